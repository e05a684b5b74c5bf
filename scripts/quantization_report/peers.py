"""Results of other stacks, as ../shared/anchors/cpu/run_all.py writes them: medians over every sample of all rounds."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.gate.metrics import agreement
from plugins.errors import KilnError
from quantization_report.language import GREEDY

_WORK = {
    "prefill512": ("prefill 512", 512),
    "prefill2048": ("prefill 2048", 2048),
    "decode_b1_ctx512": ("decode", 1),
    "batch16_256_64": ("16 requests", 16 * 64),
}
"""Test to workload, and the tokens of one sample."""
_REFERENCE = "hf fp32"


@dataclass(frozen=True)
class Peer:
    """One stack. `equal`: tokens of the first 64 after the prompt for decoding that equal FP32's; None: unknown."""

    label: str
    rates: Mapping[str, float]
    equal: int | None


def peers_from_folder(folder: Path) -> tuple[Peer, ...]:
    """Raises KilnError for a folder without results."""
    path = folder / "results.jsonl"
    if not path.is_file():
        raise KilnError(f"{path} does not exist; expected a folder that ../shared/anchors/cpu/run_all.py wrote")
    samples: dict[str, dict[str, list[float]]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["test"] in _WORK:
            samples.setdefault(row["label"], {}).setdefault(row["test"], []).extend(row["samples"])
    tokens = _tokens(folder)
    reference = tokens.get(_named(_REFERENCE))
    return tuple(
        Peer(
            label,
            {_WORK[test][0]: _WORK[test][1] / statistics.median(taken) for test, taken in tests.items()},
            _equal(tokens.get(_named(label)), reference),
        )
        for label, tests in samples.items()
    )


def _tokens(folder: Path) -> dict[str, list[int]]:
    """Greedy tokens of the decoding test by label, as the files name it."""
    found: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.tokens.json")):
        document = json.loads(path.read_text())
        if "decode" in document:
            found[path.name[3 : -len(".tokens.json")]] = document["decode"]
    return found


def _named(label: str) -> str:
    return label.replace(" ", "_").replace("/", "_")


def _equal(ours: list[int] | None, reference: list[int] | None) -> int | None:
    if ours is None or reference is None:
        return None
    return agreement(ours, reference, min(GREEDY, len(ours), len(reference))).agreed


@dataclass(frozen=True)
class Anchor:
    """The prompt after which the peers' greedy tokens are compared, and FP32's tokens."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]

    def equal(self, tokens: Sequence[int]) -> int:
        return agreement(tokens, self.tokens, len(self.tokens)).agreed


def anchor_from_folder(folder: Path) -> Anchor | None:
    """None where the folder lacks `prompts.json`, the workload that the peers were given, or FP32's tokens."""
    path, reference = folder / "prompts.json", _tokens(folder).get(_named(_REFERENCE))
    if reference is None or not path.is_file():
        return None
    return Anchor(tuple(json.loads(path.read_text())["p512"][0]), tuple(reference[:GREEDY]))
