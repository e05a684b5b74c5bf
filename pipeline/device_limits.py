"""What a CUDA device can do, measured with torch: copies, matrix products, and one call with next to no work.

The engine runs without torch; measuring takes a build of it with CUDA.
"""

import statistics
from collections.abc import Callable
from typing import Any, Literal

from plugins.errors import KilnError

ProductKind = Literal["16-bit", "fp32", "int8", "float8"]
_WIDTH = 8192
"""Inner length and columns of a product: its weight is larger than the L2 cache."""
_SLEEP, _LONGEST_SLEEP = 10_000_000, 1_000_000_000
"""Cycles of the device: 5 ms, and half a second."""


def require_torch_cuda(purpose: str) -> None:
    """Raise KilnError, which says what it is wanted for, where torch is missing or has no CUDA device."""
    try:
        import torch
    except ImportError as error:
        raise KilnError(f"{purpose} needs torch, which cannot be imported ({error}): install its CUDA build") from error
    if not torch.cuda.is_available():
        raise KilnError(
            f"{purpose} needs torch with CUDA; torch {torch.__version__} here finds no CUDA device: install its CUDA "
            "build, and see kiln doctor for the driver"
        )


def device_seconds(run: Callable[[], object], calls: int, replays: int = 9, warm_ups: int = 1) -> float:
    """Of one call, the median of so many replays of a captured graph of `calls`, after those that warm up."""
    import torch

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    for _ in range(warm_ups):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times)


def queued_seconds(stream: int, queue: Callable[[], object], wait: Callable[[], object]) -> float:
    """Seconds that the device takes for what `queue` puts into a stream, when all of it is there before it begins.

    `stream` is its handle; `wait` waits for the end. The device sleeps meanwhile, longer where that was too short.
    """
    import torch

    cycles = _SLEEP
    with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
        while True:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(cycles)
            start.record()
            queue()
            end.record()
            ahead = not start.query()
            wait()
            end.synchronize()
            if ahead or cycles > _LONGEST_SLEEP:
                return float(start.elapsed_time(end)) / 1e3
            cycles *= 2


def copy_bandwidth(size: int = 1 << 30, calls: int = 5) -> float:
    """Bytes/s, read and written, of `size` bytes, by a kernel: copy engines of a captured memory copy reach less."""
    import torch

    source = torch.randint(1 << 30, (size // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / device_seconds(lambda: torch.neg(source, out=target), calls)


def least_call() -> float:
    """Seconds that a kernel with next to no work takes in a captured graph."""
    import torch

    one = torch.zeros(1, device="cuda")
    return device_seconds(lambda: torch.neg(one, out=one), 100)


def l2_bytes() -> int:
    """Size of the device's L2 cache."""
    import torch

    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def has_float8() -> bool:
    """Whether the device multiplies numbers of 8 bits with an exponent."""
    import torch

    return torch.cuda.get_device_capability() >= (8, 9)


def product_rate(kind: ProductKind = "16-bit", rows: int = _WIDTH) -> float:
    """Operations/s, two a multiply-add, of `rows` x 8192 by 8192 x 8192; `fp32` as ONNX Runtime does it, in TF32."""
    import torch

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return 2 * rows * _WIDTH**2 / device_seconds(_product(kind, rows), 5)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _product(kind: ProductKind, rows: int) -> Callable[[], Any]:
    import torch

    shapes = ((rows, _WIDTH), (_WIDTH, _WIDTH))
    if kind == "int8":
        x, weight = (torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda") for shape in shapes)
        return lambda: torch._int_mm(x, weight.t())
    if kind == "float8":
        x, weight = (torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for shape in shapes)
        one = torch.ones((), device="cuda")
        return lambda: torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    dtype = torch.bfloat16 if kind == "16-bit" else torch.float32
    x, weight = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    out = torch.empty(rows, _WIDTH, device="cuda", dtype=dtype)
    return lambda: torch.mm(x, weight, out=out)
