"""Results of other stacks, as ../shared/anchors/cpu/run_all.py writes them: medians over every sample of all rounds.

A stack's likeness to FP32 is the number of prompts, of 64, whose first token equals that of transformers in FP32.
Longer agreement says little: one near tie that falls the other way ends it, in a stack of any precision.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.runtime.engine import Engine
from engines.runtime.request import Request, SamplingParams
from plugins.errors import KilnError

PROMPTS = 64
"""To which counts of equal first tokens are scaled."""
_WORK = {
    "prefill512": ("prefill 512", 512),
    "prefill2048": ("prefill 2048", 2048),
    "decode_b1_ctx512": ("decode", 1),
    "batch16_256_64": ("16 requests", 16 * 64),
}
"""Test to workload, and the tokens of one sample."""
_REFERENCE = "hf fp32"
_WAYS = (" at once", " stagger")
"""Ends of labels that say how one stack was given its requests."""


@dataclass(frozen=True)
class Peer:
    """One stack, or one way to use it. `equal`: prompts of PROMPTS whose first token is FP32's; None: unknown."""

    label: str
    rates: Mapping[str, float]
    equal: float | None


@dataclass(frozen=True)
class Anchor:
    """Prompts that the stacks were given, and the first token of FP32's answer to each."""

    prompts: Sequence[tuple[int, ...]]
    first: Sequence[int]

    def equal(self, engine: Engine) -> float:
        """Of PROMPTS, those whose first greedy token is FP32's."""
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        answers = engine.generate([Request(prompt, sampling) for prompt in self.prompts])
        return _scaled([answer.token_ids[0] for answer in answers], self.first)


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
    first = _first_tokens(folder)
    equal = {stack: _equal(tokens, first.get(_REFERENCE, {})) for stack, tokens in first.items()}
    return tuple(
        Peer(
            label,
            {_WORK[test][0]: _WORK[test][1] / statistics.median(taken) for test, taken in tests.items()},
            equal.get(_stack(label)),
        )
        for label, tests in samples.items()
    )


def anchor_from_folder(folder: Path) -> Anchor | None:
    """None where the folder lacks `prompts.json`, the workload that the peers were given, or FP32's tokens."""
    path, first = folder / "prompts.json", _first_tokens(folder).get(_REFERENCE)
    if not first or not path.is_file():
        return None
    sets = json.loads(path.read_text())["sets"]
    prompts = [tuple(prompt) for name in first for prompt in sets[int(name.removeprefix("set"))]]
    return Anchor(prompts, [token for tokens in first.values() for token in tokens])


def _first_tokens(folder: Path) -> dict[str, dict[str, list[int]]]:
    """By stack and set of prompts: the first token of the answer to each."""
    found: dict[str, dict[str, list[int]]] = {}
    for path in sorted(folder.glob("*.tokens.json")):
        sets = {name: answers for name, answers in json.loads(path.read_text()).items() if name.startswith("set")}
        stack = _stack(path.name[3 : -len(".tokens.json")].replace("_", " "))
        found.setdefault(stack, {}).update({name: [answer[0] for answer in sets[name]] for name in sets})
    return found


def _stack(label: str) -> str:
    for way in _WAYS:
        label = label.removesuffix(way)
    return label


def _equal(tokens: Mapping[str, Sequence[int]], reference: Mapping[str, Sequence[int]]) -> float | None:
    """None where both were not given the same prompts."""
    both = sorted(tokens.keys() & reference.keys())
    if not both:
        return None
    return _scaled([t for name in both for t in tokens[name]], [t for name in both for t in reference[name]])


def _scaled(tokens: Sequence[int], reference: Sequence[int]) -> float:
    pairs = list(zip(tokens, reference, strict=True))
    return PROMPTS * sum(ours == theirs for ours, theirs in pairs) / len(pairs)
