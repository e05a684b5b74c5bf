"""Times of a model before and after all passes, and what this machine could do at best.

Sessions of all variants are open at once and take turns, in a new order each round, with equally many threads that
rest between runs: a busy moment of the machine hits all alike.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper
from ort_profile import operator_micros

from engines.backends.base import StepInputs
from engines.backends.onnxruntime import ALTERNATING, OnnxRuntimeDecoder, OnnxRuntimeModel
from passes.onnx_model import DecoderSpec, OnnxModel
from pipeline.compare.onnx_subject import bound_graph
from pipeline.floors import decoder_work_from_graph, plain_operations
from pipeline.packed import step_inputs_of_prompt
from pipeline.verify import Feeds
from plugins.build import cpu_library
from plugins.measure import fp32_peak, read_bandwidth

KILN = "as Kiln opens it"
MODES: Mapping[str, str | None] = {
    "ORT_ENABLE_ALL": "ORT_ENABLE_ALL",
    KILN: None,
    "ORT_ENABLE_BASIC": "ORT_ENABLE_BASIC",
    "ORT_DISABLE_ALL": "ORT_DISABLE_ALL",
}
"""Name to level of ONNX Runtime's own rewrites; Kiln opens graphs at ORT_ENABLE_ALL without those it found slower."""
PROMPT, CONTEXT = 512, 160
_ROUNDS = 3
_TOP = 4

Run = Callable[[], object]
Key = TypeVar("Key")


@dataclass(frozen=True)
class Spread:
    """Seconds of one run: quartiles of all rounds."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Workload:
    """`times` by (mode, "before" or "after"). `floor`: seconds that the machine needs at best, and in words why."""

    name: str
    times: Mapping[tuple[str, str], Spread]
    floor: float
    limit: str
    shares: Mapping[str, float]
    """Share of each operator in the time of all, after the passes, the largest first."""


_IMAGES = {"batch 1": (1, 3, 224, 224), "batch 8": (8, 3, 224, 224)}
PLAIN: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "efficientnet-lite0": _IMAGES,
    "efficientnet-lite0-unfolded": _IMAGES,
    "pp-ocr-det": {"a page of 640 x 640": (1, 3, 640, 640)},
    "pp-ocr-rec": {"a line of 48 x 320": (1, 3, 48, 320)},
    "pp-ocr-cls": {"a line of 48 x 192": (1, 3, 48, 192)},
    "minilm": {"1 text of 128 tokens": (1, 128), "8 texts of 128 tokens": (8, 128)},
}
"""Shapes of all inputs of a workload, by model and workload."""


def time_model(
    name: str, before: OnnxModel, after: OnnxModel, inputs: Sequence[Feeds], threads: int, seconds: float
) -> list[Workload]:
    """A model without workloads here is timed on the first of `inputs`.

    `seconds` for each workload, or three rounds if they take longer.
    """
    with tempfile.TemporaryDirectory(prefix="kiln-times-") as folder:
        graphs = {"before": bound_graph(before.path, Path(folder)), "after": after.path}
        if before.decoder is not None:
            return _time_decoder(graphs, before.decoder, threads, seconds)
        workloads = {title: feeds_of(before, shape) for title, shape in PLAIN.get(name, {}).items()}
        return [
            _time_plain(title, graphs, feeds, threads, seconds)
            for title, feeds in (workloads or {"one call": dict(inputs[0])}).items()
        ]


def feeds_of(model: OnnxModel, shape: tuple[int, ...]) -> dict[str, NDArray]:
    """Random pixels, or random tokens without padding."""
    generator = np.random.default_rng(0)
    if model.inputs[0].dtype == "float32":
        return {model.inputs[0].name: generator.uniform(-1, 1, shape).astype(np.float32)}
    made = {"input_ids": generator.integers(1000, 20000, shape), "attention_mask": np.ones(shape, np.int64)}
    return {tensor.name: made.get(tensor.name, np.zeros(shape, np.int64)) for tensor in model.inputs}


def _time_plain(
    name: str, graphs: Mapping[str, Path], feeds: dict[str, NDArray], threads: int, seconds: float
) -> Workload:
    def opened(path: Path) -> OnnxRuntimeModel:
        return OnnxRuntimeModel(path, plugins=[cpu_library()], threads=threads, config=ALTERNATING)

    peak = fp32_peak(threads)
    operations = plain_operations(graphs["before"], feeds)
    calls = {}
    for mode, level in MODES.items():
        for side, path in graphs.items():
            with opened_at(level):
                calls[mode, side] = _infers(opened(path), feeds)
    times = interleaved(calls, seconds)
    shares = _shares(lambda: opened(graphs["after"]), lambda model: model.infer(feeds))
    return Workload(name, times, operations / peak, _compute_limit(operations, peak), shares)


def _infers(model: OnnxRuntimeModel, feeds: dict[str, NDArray]) -> Run:
    return lambda: model.infer(feeds)


def _time_decoder(graphs: Mapping[str, Path], spec: DecoderSpec, threads: int, seconds: float) -> list[Workload]:
    inputs = {
        f"prompt of {PROMPT} tokens": step_inputs_of_prompt(PROMPT, spec),
        f"one token after {CONTEXT}": step_inputs_of_token(CONTEXT, spec),
    }
    blocks = max(step.block_table.size for step in inputs.values())

    def opened(path: Path) -> OnnxRuntimeDecoder:
        return OnnxRuntimeDecoder(path, spec.kv, blocks, plugins=[cpu_library()], threads=threads, config=ALTERNATING)

    decoders = {}
    for mode, level in MODES.items():
        for side, path in graphs.items():
            with opened_at(level):
                decoders[mode, side] = opened(path)
    work = decoder_work_from_graph(graphs["before"], spec)
    workloads = []
    for name, step in inputs.items():
        if len(step.input_ids) > 1:
            operations, peak = work.prefill_operations(PROMPT), fp32_peak(threads)
            floor, limit = operations / peak, _compute_limit(operations, peak)
        else:
            read, bandwidth = work.decode_bytes(1, CONTEXT + 1), read_bandwidth(threads=threads)
            floor, limit = read / bandwidth, f"{read / 1e6:,.0f} MB at {bandwidth / 1e9:.1f} GB/s"
        times = interleaved({key: _steps(decoder, step) for key, decoder in decoders.items()}, seconds)
        shares = _shares(lambda: opened(graphs["after"]), lambda decoder, step=step: decoder.step(step))
        workloads.append(Workload(name, times, floor, limit, shares))
    return workloads


def _steps(decoder: OnnxRuntimeDecoder, inputs: StepInputs) -> Run:
    return lambda: decoder.step(inputs)


def _compute_limit(operations: float, peak: float) -> str:
    return f"{operations / 1e9:.1f} Gop of products at {peak / 1e9:.0f} Gop/s"


def step_inputs_of_token(past: int, spec: DecoderSpec) -> StepInputs:
    """One sequence of `past` tokens, whatever its cache holds, and its next token."""
    blocks = -(-(past + 1) // spec.kv.block_size)
    return StepInputs(
        input_ids=np.array([1], np.int32),
        position_ids=np.array([past], np.int32),
        logits_indices=np.array([0], np.int32),
        cumulative_sequence_length=np.array([0, 1], np.int32),
        past_seqlens=np.array([past], np.int32),
        block_table=np.arange(blocks, dtype=np.int32)[None],
        slot_mapping=np.array([past], np.int32),
    )


@contextlib.contextmanager
def opened_at(level: str | None) -> Iterator[None]:
    """Sessions that Kiln's backends open get this level and all rewrites in it; None leaves Kiln's own choice."""
    original = onnxruntime.InferenceSession

    def session(path: str, options: Any, providers: list[str], disabled_optimizers: Any = None) -> Any:
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, str(level))
        return original(path, options, providers=providers)

    with patch.object(onnxruntime, "InferenceSession", session if level else original):
        yield


def interleaved(calls: Mapping[Key, Run], seconds: float) -> dict[Key, Spread]:
    """All calls in turn, in another order each round, after one of each to warm up."""
    times: dict[Key, list[float]] = {key: [] for key in calls}
    keys, generator = list(calls), np.random.default_rng(0)
    for call in calls.values():
        call()
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < _ROUNDS or time.perf_counter() < end:
        for index in generator.permutation(len(keys)):
            start = time.perf_counter()
            calls[keys[index]]()
            times[keys[index]].append(time.perf_counter() - start)
        rounds += 1
    return {key: Spread(*statistics.quantiles(taken, n=4)) for key, taken in times.items()}


def _shares(make: Callable[[], Any], run: Callable[[Any], object]) -> dict[str, float]:
    """Time by operator of four profiled runs; the first, which warms up, is among them."""
    spent = operator_micros(make, lambda backend: [run(backend) for _ in range(4)])
    return {name: micros / spent.total() for name, micros in spent.most_common(_TOP)}


def time_skip_norms(threads: int, seconds: float) -> dict[str, tuple[Spread, Spread]]:
    """A residual and the norm of it in ONNX Runtime's fused operator, and apart: why Kiln leaves them apart on CPUs."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="kiln-skip-norm-") as folder:
        for norm, rows, width in (("SimplifiedLayerNormalization", 512, 576), ("LayerNormalization", 1024, 384)):
            generator = np.random.default_rng(0)
            feeds = {name: generator.standard_normal((1, rows, width)).astype(np.float32) for name in ("x", "skip")}
            calls = {}
            for fused in (True, False):
                path = Path(folder) / f"{norm}-{fused}.onnx"
                path.write_bytes(_residual_and_norm(norm, fused, width).SerializeToString())
                calls[fused] = _infers(OnnxRuntimeModel(path, threads=threads, config=ALTERNATING), feeds)
            times = interleaved(calls, seconds)
            found[f"{norm} of [1, {rows}, {width}]"] = (times[True], times[False])
    return found


def _residual_and_norm(norm: str, fused: bool, width: int) -> Any:
    """Gives the norm and, as the next residual needs it, the sum."""
    weights = ["weight"] if norm.startswith("Simplified") else ["weight", "bias"]
    if fused:
        outputs = ["y", "", "", "sum"]
        nodes = [
            helper.make_node(f"Skip{norm}", ["x", "skip", *weights], outputs, domain="com.microsoft", epsilon=1e-5)
        ]
    else:
        nodes = [
            helper.make_node("Add", ["x", "skip"], ["sum"]),
            helper.make_node(norm, ["sum", *weights], ["y"], axis=-1, epsilon=1e-5),
        ]
    shape, kind = [1, "rows", width], TensorProto.FLOAT
    x, skip, total, y = (helper.make_tensor_value_info(name, kind, shape) for name in ("x", "skip", "sum", "y"))
    initializers = [helper.make_tensor(name, kind, [width], np.ones(width, np.float32)) for name in weights]
    graph = helper.make_graph(nodes, "residual_and_norm", [x, skip], [y, total], initializers)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)
