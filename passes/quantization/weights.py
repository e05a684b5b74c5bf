"""Weights of a layer as integers, by the method that its plan names. Knows no graph."""

import numpy as np
from numpy.typing import NDArray

from passes.quantization.cuda_schemes import FORMAT_OF
from passes.quantization.gptq import gptq
from passes.quantization.grid import Grid, QuantisedWeight, Zeros, round_to_nearest
from passes.quantization.hqq import hqq
from passes.quantization.plan import FOUR_BITS, LayerPlan
from passes.quantization.support import Kernels
from plugins.errors import KilnError
from plugins.quant_matmul.cuda_packing import quantize


def zeros_of(plan: LayerPlan, kernels: Kernels) -> Zeros:
    """4 bits need zeros; MatMulNBits packs them as integers, Kiln's operators for CPUs take any, for CUDA none."""
    if plan.scheme not in FOUR_BITS or kernels == "cuda-plugins":
        return "none"
    return "real" if kernels == "cpu-plugins" else "integer"


def grid_of(plan: LayerPlan, zeros: Zeros = "none") -> Grid:
    """The grid of a layer's weights. Rounding to nearest at 4 bits may clip, as AWQ's does too."""
    bits, clip = 8, plan.rounding == "awq"
    if plan.scheme in FOUR_BITS:
        bits, clip = 4, plan.rounding in ("rtn", "awq")
    return Grid(4 if bits == 4 else 8, plan.group_size, zeros, clip)


def quantise_weight(
    name: str,
    weight: NDArray[np.floating],
    plan: LayerPlan,
    moments: NDArray[np.floating] | None = None,
    zeros: Zeros = "none",
) -> QuantisedWeight:
    """`weight` [depth, width] of the layer `name`. GPTQ needs the second `moments` [depth, depth] of its activations.

    Raises KilnError for weights that are not finite, and where the moments lack or have another size.
    """
    grid = grid_of(plan, zeros)
    if not np.isfinite(weight).all():
        raise KilnError(f"layer {name} has weights that are not finite; it cannot be quantised: keep it as float")
    if plan.rounding == "hqq":
        return hqq(weight, grid)
    if plan.rounding != "gptq":
        return round_to_nearest(weight, grid)
    if moments is None:
        raise KilnError(
            f"layer {name} is planned with GPTQ, which needs the second moments of its input; collect them in "
            "calibration, or plan it with rtn or hqq"
        )
    depth = len(weight)
    if moments.shape != (depth, depth) or not np.isfinite(moments).all():
        raise KilnError(
            f"layer {name}: second moments are {list(moments.shape)}, or not finite; expected finite [{depth}, {depth}]"
        )
    return gptq(weight, moments, grid)


def quantised_for_cuda(
    name: str, weight: NDArray[np.float32], plan: LayerPlan, moments: NDArray[np.floating] | None = None
) -> tuple[NDArray[np.generic], NDArray[np.float32]]:
    """(w [width, depth], scales [groups, width]) of `weight` [depth, width] of the layer `name`.

    w is int8, for int4 too, or float8_e4m3fn, rounded to nearest; grids are symmetric, as the kernels know no zeros.
    Raises KilnError as `quantise_weight` does.
    """
    if FORMAT_OF[plan.scheme] == "float8e4m3fn":
        if not np.isfinite(weight).all():
            raise KilnError(f"layer {name} has weights that are not finite; it cannot be quantised: keep it as float")
        return quantize(weight.T, "float8e4m3fn")
    found = quantise_weight(name, weight, plan, moments)
    return np.ascontiguousarray(found.integers.T), np.ascontiguousarray(found.scales.T)
