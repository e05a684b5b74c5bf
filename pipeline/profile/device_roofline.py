"""The roofline of the CUDA device at hand, measured with torch (`pipeline.device_limits`).

Products are measured for as many rows as a phase has, but for at least 256: with fewer, reading the weight takes longer
than multiplying with it, so that a measured rate would say nothing of the arithmetic. The rates of memory and of the L2
cache are those of copies, of 1 GiB and of a quarter of the cache.
"""

from collections.abc import Iterable

from pipeline.device_limits import copy_bandwidth, has_float8, l2_bytes, least_call, product_rate
from pipeline.operator_work import Arithmetic
from pipeline.profile.roofline import Roofline

_FEWEST, _MOST = 256, 8192
"""Rows."""


def measure_device_roofline(rows: Iterable[int], fp32: bool) -> Roofline:
    """Takes some seconds and, for a moment, 2 GiB of the device; `fp32`: with products in FP32, too."""
    import torch

    sizes = sorted({min(max(1 << (count - 1).bit_length(), _FEWEST), _MOST) for count in rows if count > 0} | {_MOST})
    kinds: tuple[Arithmetic, ...] = ("16-bit", "int8", *(("float8",) if has_float8() else ()))
    kinds += ("fp32",) if fp32 else ()
    products = {kind: {size: product_rate(kind, size) for size in sizes} for kind in kinds}
    memory, cached = copy_bandwidth(), l2_bytes() // 2
    found = Roofline(
        memory=memory,
        cache=max(memory, copy_bandwidth(cached // 2, 50)),
        peak=max(products["16-bit"].values()),
        products=products,
        cached=cached,
        peak_of="16-bit",
        call=least_call(),
    )
    torch.cuda.empty_cache()
    return found
