"""The device's limits, and Kiln's attention kernels against them, as scripts/bench_cuda_attention.py measures those.

Needs torch with CUDA, which measures; the engine itself runs without.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

from gpu_bench.figures import Figure
from pipeline.device_limits import copy_bandwidth, product_rate

DECODE = ((1, 4096), (8, 4096), (64, 512), (64, 4096), (256, 1024))
"""Sequences and their lengths."""
PROMPT = 4096


@dataclass(frozen=True)
class DeviceLimits:
    """`bandwidth` of a copy in bytes/s, read and written; `product_rate` in operations/s of 16-bit matrix products."""

    bandwidth: float
    product_rate: float

    def seconds(self, operations: float, read: float) -> float:
        """Least time for so many operations and bytes, whichever takes longer."""
        return max(operations / self.product_rate, read / self.bandwidth)


def measure_device() -> DeviceLimits:
    return DeviceLimits(copy_bandwidth(), product_rate())


def attention_figures(library: Path, limits: DeviceLimits, block_size: int) -> list[Figure]:
    """Microseconds of one token of each sequence, and the rate of a prompt."""
    import torch
    from bench_cuda_attention import HEAD_DIM, HEADS, KV_HEADS, measure

    from plugins.paged_attention.cuda_calls import CudaAttention

    operator = CudaAttention(ctypes.CDLL(str(library)))
    figures = []
    for sequences, length in DECODE:
        taken, _ = measure(operator, sequences, 1, length - 1, block_size)
        least = sequences * length * KV_HEADS * HEAD_DIM * 4 / limits.bandwidth
        figures.append(Figure(f"attention, {sequences} x {length}", taken * 1e6, "us", least * 1e6))
    taken, _ = measure(operator, 1, PROMPT, 0, block_size)
    rate = 4 * HEADS * HEAD_DIM * PROMPT * (PROMPT + 1) / 2 / taken
    figures.append(Figure(f"attention, prompt of {PROMPT}", rate / 1e12, "TFLOP/s", limits.product_rate / 1e12, True))
    torch.cuda.empty_cache()
    return figures
