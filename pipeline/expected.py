"""Logits of a few texts in FP32, kept in a bundle that was built where its GPU was not, for comparison on the GPU.

Each text is taken as a prompt but for its last tokens, which follow one by one, so that a comparison sees prompts and
captured decode steps. Knows no GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engines.backends.base import DecoderBackend
from passes.onnx_model import DecoderSpec, OnnxModel
from pipeline.load import TorchModel
from pipeline.packed import logits_of_backend, packed_logits
from plugins.errors import KilnError

EXPECTED = "expected-logits.npz"
_LENGTHS = (5, 37, 64, 130)
_SINGLE = 3
"""Tokens at a text's end that are decoded one by one."""


@dataclass(frozen=True)
class Expected:
    """`texts` are token ids; `rows` [1 + _SINGLE, vocabulary] each: logits after the prompt and each single token."""

    texts: tuple[NDArray[np.int64], ...]
    rows: tuple[NDArray[np.float32], ...]

    def save(self, path: Path) -> None:
        arrays = {f"ids{n}": ids for n, ids in enumerate(self.texts)} | {
            f"logits{n}": rows for n, rows in enumerate(self.rows)
        }
        np.savez_compressed(path, **arrays)  # type: ignore[arg-type]

    def worst_error(self, backend: DecoderBackend, decoder: DecoderSpec) -> float:
        """max|found - expected| / max|expected| over all texts, in one batch; NaN where anything is not finite."""
        found = logits_of_backend(backend, decoder, list(self.texts), steps_of(self.texts), last_rows=1)
        worst = 0.0
        for rows, expected in zip(found, self.rows, strict=True):
            error = np.abs(rows - expected).max() / np.abs(expected).max()
            worst = float(np.maximum(worst, error))  # keeps a NaN
        return worst


def expected_from_file(path: Path) -> Expected:
    """Read what `Expected.save` wrote. Raises KilnError for anything else."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            count = len(arrays.files) // 2
            texts = tuple(arrays[f"ids{n}"] for n in range(count))
            return Expected(texts, tuple(arrays[f"logits{n}"] for n in range(count)))
    except (OSError, EOFError, KeyError, ValueError) as error:
        raise KilnError(f"{path} holds no expected logits ({error}); build the bundle again") from error


def texts_for(decoder: DecoderSpec) -> tuple[NDArray[np.int64], ...]:
    """Seeded random tokens, the same for every machine."""
    generator = np.random.default_rng(5)
    lengths = [min(length, decoder.max_context) for length in _LENGTHS]
    return tuple(generator.integers(0, decoder.vocab_size, length) for length in lengths)


def steps_of(texts: Sequence[NDArray]) -> list[list[int]]:
    """Tokens of each text in each step: a mixed step of all prompts, then single tokens."""
    prompts = [_prompt(text) for text in texts]
    singles = [
        [int(step < len(text) - prompt) for text, prompt in zip(texts, prompts, strict=True)] for step in range(_SINGLE)
    ]
    return [prompts, *singles]


def _prompt(text: NDArray) -> int:
    """Tokens of a text that are taken at once."""
    return max(len(text) - _SINGLE, 1)


def expected_from_torch(model: TorchModel, decoder: DecoderSpec) -> Expected:
    """What the torch model gives."""
    import torch

    texts, rows = texts_for(decoder), []
    for text in texts:
        with torch.inference_mode():
            logits = model.module(input_ids=torch.from_numpy(text)[None], use_cache=False).logits[0].float().numpy()
        rows.append(logits[_prompt(text) - 1 :].copy())
    return Expected(texts, tuple(rows))


def expected_from_graph(graph: Path, model: OnnxModel, plugins: Sequence[Path]) -> Expected:
    """What a bound serving graph gives on this machine's CPU, without any optimisation."""
    assert model.decoder is not None
    texts = texts_for(model.decoder)
    rows = packed_logits(graph, model.decoder, plugins, list(texts), steps_of(texts), optimized=False, last_rows=1)
    return Expected(texts, tuple(row.astype(np.float32) for row in rows))
