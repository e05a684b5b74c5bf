"""The numeric check that an engine passes before it is published: its outputs on fresh inputs against a reference.

The reference is the torch model where there is one; an .onnx source is compared with itself, unoptimised.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engines.backends.base import StepInputs
from engines.backends.onnxruntime import OnnxRuntimeDecoder, OnnxRuntimeModel, ort_message
from engines.manifest import CheckRecord
from passes.onnx_model import DecoderSpec, OnnxModel, load_structure
from pipeline.compare.inputs import InputSpec, input_specs_from_graph, samples_from_inputs
from plugins.errors import KilnError
from plugins.paged_attention.schema import CacheDtype

if TYPE_CHECKING:
    from pipeline.load import TorchModel

LIMITS: dict[CacheDtype, tuple[float, str]] = {
    "float32": (1e-4, "FP32 sums in another order over a deep network"),
    "float16": (1e-2, "keys and values rounded to 10 bits of mantissa in the cache"),
    "bfloat16": (5e-2, "keys and values rounded to 7 bits of mantissa in the cache"),
}
"""By type of the KV cache: the largest max|engine - reference| / max|reference| allowed, and why."""
_SAMPLES = 3

Infer = Callable[[Mapping[str, NDArray]], Mapping[str, NDArray]]


def check_against_torch(
    model: "TorchModel", engine: Path, decoder: DecoderSpec | None, plugins: list[Path]
) -> CheckRecord:
    """Compare the engine with the torch model. Raises KilnError beyond the limit."""
    from pipeline.compare.torch_subject import torch_subject_from_model

    if decoder is not None:
        with _engine_runs():
            error = _decoder_error(model, engine, decoder, plugins)
        return _verdict("logits against torch", error, decoder.kv.dtype)
    subject = torch_subject_from_model(model)
    with _engine_runs():
        error = _plain_error(engine, plugins, subject.inputs, subject.infer)  # type: ignore[union-attr]
    return _verdict("outputs against torch", error)


def check_against_unoptimised(model: OnnxModel, plugins: list[Path]) -> CheckRecord:
    """Compare an engine made from an .onnx file with the same graph without any optimisation. Raises KilnError."""
    import onnxruntime

    specs = input_specs_from_graph(
        load_structure(model.path), [(tensor.name, tensor.dtype, tensor.shape) for tensor in model.inputs]
    )
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    names = [output.name for output in model.outputs]
    with _engine_runs():
        session = onnxruntime.InferenceSession(str(model.path), options, providers=["CPUExecutionProvider"])
        error = _plain_error(
            model.path, plugins, specs, lambda feeds: dict(zip(names, session.run(names, dict(feeds)), strict=True))
        )
    return _verdict("outputs against the unoptimised graph", error)


def check_decoder_alone(engine: Path, decoder: DecoderSpec, plugins: list[Path]) -> CheckRecord:
    """For a serving graph without its torch model: a prompt in chunks must give what it gives at once."""
    ids = np.random.default_rng(0).integers(0, decoder.vocab_size, 24)
    with _engine_runs():
        whole = _packed_logits(engine, decoder, plugins, [ids], [[24]])
        parts = _packed_logits(engine, decoder, plugins, [ids], [[9], [1], [14]])
    return _verdict(
        "logits of a prompt in chunks against the whole", _relative_error(parts[0], whole[0]), decoder.kv.dtype
    )


@contextmanager
def _engine_runs() -> Iterator[None]:
    """ONNX Runtime's errors have no common base; an engine that it cannot run is no reason for a traceback."""
    try:
        yield
    except KilnError:
        raise
    except Exception as error:
        raise KilnError(f"the engine does not run: {ort_message(error)}; nothing was published") from error


def _verdict(name: str, error: float, cache_dtype: CacheDtype = "float32") -> CheckRecord:
    limit, origin = LIMITS[cache_dtype]
    if not error <= limit:  # a NaN fails
        raise KilnError(
            f"the engine is wrong: {name}, max|difference| / max|reference| is {error:.3g}, limit {limit:.0e} "
            f"({origin}); nothing was published. Please report the model's architecture"
        )
    return CheckRecord(name=name, value=error, limit=limit, origin=origin)


def _plain_error(engine: Path, plugins: list[Path], specs: tuple[InputSpec, ...], reference: Infer) -> float:
    """Largest relative error over all outputs of some random inputs of several sizes."""
    backend = OnnxRuntimeModel(engine, plugins=plugins)
    worst = 0.0
    for feeds in samples_from_inputs(specs, _SAMPLES, seed=1):
        found, expected = backend.infer(feeds), reference(feeds)
        for name, value in expected.items():
            if found[name].shape != value.shape:
                raise KilnError(f"output '{name}' has shape {found[name].shape}, the reference {value.shape}")
            worst = _worse(worst, _relative_error(found[name], value))
    backend.close()
    return worst


def _decoder_error(model: "TorchModel", engine: Path, decoder: DecoderSpec, plugins: list[Path]) -> float:
    """Three sequences in two packed steps, chunk and single token mixed, against torch one by one."""
    import torch

    generator = np.random.default_rng(1)
    steps = [[21, 1, 12], [1, 16, 1]]
    lengths: list[int] = np.sum(steps, axis=0).tolist()
    texts = [generator.integers(0, decoder.vocab_size, min(length, decoder.max_context)) for length in lengths]
    found = _packed_logits(engine, decoder, plugins, texts, steps)
    worst = 0.0
    for text, rows in zip(texts, found, strict=True):
        with torch.inference_mode():
            expected = model.module(input_ids=torch.from_numpy(text)[None], use_cache=False).logits[0].numpy()
        worst = _worse(worst, _relative_error(rows, expected))
    return worst


def _packed_logits(
    engine: Path, decoder: DecoderSpec, plugins: list[Path], texts: list[NDArray], steps: list[list[int]]
) -> list[NDArray]:
    """Logits of every token of every text; each step takes its number of tokens from each text."""
    size = decoder.kv.block_size
    blocks = [-(-len(text) // size) for text in texts]
    width, total = max(blocks), sum(blocks)
    order = np.random.default_rng(2).permutation(total).astype(np.int32)  # as scattered as in a busy pool
    table = np.zeros((len(texts), width), np.int32)
    for row, count in enumerate(blocks):
        table[row, :count] = order[sum(blocks[:row]) :][:count]
    backend = OnnxRuntimeDecoder(engine, decoder.kv, total, plugins=plugins)
    rows: list[list[NDArray]] = [[] for _ in texts]
    past = np.zeros(len(texts), np.int32)
    for step in steps:
        starts: list[int] = past.tolist()
        counts = [min(count, len(text) - start) for count, text, start in zip(step, texts, starts, strict=True)]
        positions = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        slots = [table[row, where // size] * size + where % size for row, where in enumerate(positions)]
        ids = [text[where] for text, where in zip(texts, positions, strict=True)]
        cumulative = np.cumsum([0, *counts]).astype(np.int32)
        logits = backend.step(
            StepInputs(
                input_ids=np.concatenate(ids).astype(np.int32),
                position_ids=np.concatenate(positions).astype(np.int32),
                logits_indices=np.arange(cumulative[-1], dtype=np.int32),
                cumulative_sequence_length=cumulative,
                past_seqlens=past.copy(),
                block_table=table,
                slot_mapping=np.concatenate(slots).astype(np.int32),
            )
        )
        for row, part in enumerate(np.split(logits, cumulative[1:-1])):
            rows[row].append(part)
        past += np.array(counts, np.int32)
    backend.close()
    return [np.concatenate(parts) for parts in rows]


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
