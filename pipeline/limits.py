"""This machine's limits, measured: what floors are computed from. And how much memory this process took.

The rate of matrix products is ONNX Runtime's own FP32 MatMul, because that is what engines run on; how far it
is from the processor's peak is the plugins' business (`plugins.measure.fp32_peak`).
"""

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from engines.backends.memory import process_memory
from plugins.measure import read_bandwidth

_SHAPES = ((512, 576, 1536), (512, 1536, 576), (1024, 1024, 1024), (2048, 1024, 2048))
"""Rows, inner length, columns: from a small decoder's to a large square."""


@dataclass(frozen=True)
class Limits:
    """`read_bandwidth` in bytes/s; `product_rate` in operations/s, two a multiply-add, at `product_shape`."""

    read_bandwidth: float
    product_rate: float
    product_shape: str


def best_limits(first: Limits, second: Limits) -> Limits:
    """The higher of each of two measurements: what the machine can do when nobody else uses it."""
    faster = max(first, second, key=lambda limits: limits.product_rate)
    return replace(faster, read_bandwidth=max(first.read_bandwidth, second.read_bandwidth))


def measure_limits(threads: int) -> Limits:
    """Takes about 2 s and, for a moment, 512 MiB."""
    rates = {shape: product_rate(*shape, threads) for shape in _SHAPES}
    best = max(rates, key=lambda shape: rates[shape])
    return Limits(
        read_bandwidth=read_bandwidth(threads=threads),
        product_rate=rates[best],
        product_shape="x".join(map(str, best)),
    )


def product_rate(
    rows: int, inner: int, columns: int, threads: int, seconds: float = 0.25, kind: Literal["fp32", "int8"] = "fp32"
) -> float:
    """Operations/s of the fastest of the calls that fit in `seconds`; of `int8` with sums in int32."""
    import onnx
    import onnxruntime

    generator = np.random.default_rng(0)
    helper, types = onnx.helper, onnx.TensorProto
    if kind == "int8":
        name, x_type, y_type = "MatMulInteger", types.UINT8, types.INT32
        weight = generator.integers(-127, 128, (inner, columns), np.int8)
        x: Any = generator.integers(0, 128, (rows, inner), np.uint8)
    else:
        name, x_type, y_type = "MatMul", types.FLOAT, types.FLOAT
        weight = generator.standard_normal((inner, columns), dtype=np.float32)
        x = generator.standard_normal((rows, inner), dtype=np.float32)
    graph = helper.make_graph(
        [helper.make_node(name, ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", x_type, [rows, inner])],
        [helper.make_tensor_value_info("y", y_type, [rows, columns])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {"x": x}
    session.run(None, feeds)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        session.run(None, feeds)
        best = min(best, time.perf_counter() - start)
    return 2.0 * rows * inner * columns / best


def reset_peak_memory() -> None:
    """Let this process's peak start from what it holds now, where Linux allows it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> float | None:
    """Most bytes of resident memory so far (VmHWM); None where the system does not say."""
    return process_memory("VmHWM")
