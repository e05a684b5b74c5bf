"""The numeric check that an engine passes before it is published: its outputs on fresh inputs against a reference.

The reference is the torch model where there is one; an .onnx source is compared with itself, unoptimised.
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engines.backends.onnxruntime import ort_message
from engines.manifest import CheckRecord
from passes.manager import NEAR_ZERO
from passes.onnx_model import DecoderSpec, OnnxModel
from pipeline.compare.inputs import samples_from_inputs
from pipeline.compare.onnx_subject import bound_graph
from pipeline.config import Precision
from pipeline.packed import packed_logits
from pipeline.verify import Feeds, Outputs, errors_between, generated_inputs, run_plain, with_cache_of
from plugins.errors import KilnError
from plugins.paged_attention.schema import CacheDtype

if TYPE_CHECKING:
    from pipeline.load import TorchModel

LIMITS: dict[CacheDtype, tuple[float, str]] = {
    "float32": (1e-4, "FP32 sums in another order over a deep network"),
    "float16": (1e-2, "keys and values rounded to 10 bits of mantissa in the cache"),
    "bfloat16": (5e-2, "keys and values rounded to 7 bits of mantissa in the cache"),
    "int8": (1e-1, "keys or values rounded to 127 levels of each head's largest in the cache"),
}
"""By type of the KV cache: the largest max|engine - reference| / max|reference| allowed, and why."""
HALF_LIMITS: dict[Precision, tuple[float, str]] = {
    "fp16": (2e-2, "weights, activations and sums of layers rounded to 10 bits of mantissa"),
    "bf16": (1e-1, "weights, activations and sums of layers rounded to 7 bits of mantissa"),
}
"""The same for engines that compute in 16 bits, whatever their cache."""
_SAMPLES = 3


def check_against_torch(
    model: "TorchModel",
    engine: Path,
    decoder: DecoderSpec | None,
    plugins: list[Path],
    changed: bool = False,
    precision: Precision = "fp32",
) -> CheckRecord:
    """Compare the engine with the torch model. Raises KilnError beyond the limit.

    `changed`: a pass made another model of it on request (pruning), so there is no limit.
    """
    from pipeline.compare.torch_subject import torch_subject_from_model

    if decoder is not None:
        with _engine_runs():
            error = _decoder_error(model, engine, decoder, plugins)
        return verdict("logits against torch", error, decoder.kv.dtype, changed, precision)
    subject = torch_subject_from_model(model)
    with _engine_runs():
        samples = samples_from_inputs(subject.inputs, _SAMPLES, seed=1)  # type: ignore[union-attr]
        expected = [subject.infer(feeds) for feeds in samples]  # type: ignore[union-attr]
        error = _plain_error(expected, run_plain(engine, plugins, samples, optimized=True))
    return verdict("outputs against torch", error, changed=changed, precision=precision)


def check_against_unoptimised(
    source: OnnxModel,
    engine: Path,
    plugins: list[Path],
    inputs: Sequence[Feeds] | None,
    changed: bool = False,
    precision: Precision = "fp32",
) -> CheckRecord:
    """Compare an engine with the .onnx file that it was made from, run without any optimisation. Raises KilnError."""
    with _engine_runs():
        if source.decoder is not None:
            decoder = with_cache_of(engine, source.decoder)
            error = _error_against_graph(source.path, source.decoder, engine, decoder, plugins)
            return verdict("logits against the unoptimised graph", error, decoder.kv.dtype, changed, precision)
        samples = inputs or generated_inputs(source, plugins)
        expected = run_plain(source.path, plugins, samples)
        error = _plain_error(expected, run_plain(engine, plugins, samples, optimized=True))
    return verdict("outputs against the unoptimised graph", error, changed=changed, precision=precision)


def check_against_parent(
    parent: Path, parent_decoder: DecoderSpec, engine: Path, decoder: DecoderSpec, plugins: list[Path]
) -> CheckRecord:
    """Compare an engine that stores its cache in other blocks with the one it was made from. Raises KilnError."""
    generator = np.random.default_rng(1)
    steps = [[70, 1, 12], [1, 33, 1], [9, 2, 70]]
    lengths: list[int] = np.sum(steps, axis=0).tolist()
    texts = [generator.integers(0, decoder.vocab_size, min(length, decoder.max_context)) for length in lengths]
    with _engine_runs():
        expected = packed_logits(parent, parent_decoder, plugins, texts, steps)
        found = packed_logits(engine, decoder, plugins, texts, steps)
    error = 0.0
    for rows, known in zip(found, expected, strict=True):
        error = _worse(error, _relative_error(rows, known))
    blocks = f"blocks of {decoder.kv.block_size} against {parent_decoder.kv.block_size}"
    return verdict(f"logits with {blocks}", error, decoder.kv.dtype)


def _error_against_graph(
    source: Path, source_decoder: DecoderSpec, engine: Path, decoder: DecoderSpec, plugins: list[Path]
) -> float:
    """A prompt at once and in chunks, against the source's graph, which takes it at once."""
    ids = np.random.default_rng(0).integers(0, decoder.vocab_size, min(24, decoder.max_context))
    with tempfile.TemporaryDirectory(prefix="kiln-check-") as folder:
        graph = bound_graph(source, Path(folder))
        expected = packed_logits(graph, source_decoder, plugins, [ids], [[24]], optimized=False)
    found = [packed_logits(engine, decoder, plugins, [ids], steps) for steps in ([[24]], [[9], [1], [14]])]
    return _worse(*(_relative_error(rows[0], expected[0]) for rows in found))


def _plain_error(expected: Sequence[Outputs], found: Sequence[Outputs]) -> float:
    """The relative error; the absolute one of outputs whose values all lie near zero, as probabilities of noise do."""
    errors = errors_between(expected, found)
    return errors.absolute if errors.absolute <= NEAR_ZERO * LIMITS["float32"][0] else errors.relative


@contextmanager
def _engine_runs() -> Iterator[None]:
    """ONNX Runtime's errors have no common base; an engine that it cannot run is no reason for a traceback."""
    try:
        yield
    except KilnError:
        raise
    except Exception as error:
        raise KilnError(f"the engine does not run: {ort_message(error)}; nothing was published") from error


def verdict(
    name: str,
    error: float,
    cache_dtype: CacheDtype = "float32",
    changed: bool = False,
    precision: Precision = "fp32",
) -> CheckRecord:
    """The record of an error within its limit. Raises KilnError beyond it."""
    limit, origin = HALF_LIMITS.get(precision) or LIMITS[cache_dtype]
    if changed and math.isfinite(error):
        return CheckRecord(name=name, value=error, limit=None, origin="the model was changed on request: judge it")
    if not error <= limit:  # a NaN fails
        raise KilnError(
            f"the engine is wrong: {name}, max|difference| / max|reference| is {error:.3g}, limit {limit:.0e} "
            f"({origin}); nothing was published. Please report the model's architecture"
        )
    return CheckRecord(name=name, value=error, limit=limit, origin=origin)


def _decoder_error(model: "TorchModel", engine: Path, decoder: DecoderSpec, plugins: list[Path]) -> float:
    """Three sequences in two packed steps, chunk and single token mixed, against torch one by one."""
    import torch

    generator = np.random.default_rng(1)
    steps = [[21, 1, 12], [1, 16, 1]]
    lengths: list[int] = np.sum(steps, axis=0).tolist()
    texts = [generator.integers(0, decoder.vocab_size, min(length, decoder.max_context)) for length in lengths]
    found = packed_logits(engine, decoder, plugins, texts, steps)
    worst = 0.0
    for text, rows in zip(texts, found, strict=True):
        with torch.inference_mode():
            expected = model.module(input_ids=torch.from_numpy(text)[None], use_cache=False).logits[0].numpy()
        worst = _worse(worst, _relative_error(rows, expected))
    return worst


def _relative_error(found: NDArray, expected: NDArray) -> float:
    """max|found - expected| / max|expected|; NaN where either is not finite."""
    if found.size == 0:
        return 0.0
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    if not (np.isfinite(found).all() and np.isfinite(expected).all()):
        return float("nan")
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), np.finfo(np.float32).tiny))


def _worse(first: float, second: float) -> float:
    return float(np.maximum(first, second))  # keeps a NaN
