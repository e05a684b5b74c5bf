"""The quantising passes that a plan needs on a target, in their order, and what is checked before anything is written.

They run on the graph that was calibrated. Those that share an object know of each other what has changed since then:
SmoothQuant and AWQ divide activations, and ranges and second moments follow.
"""

from collections.abc import Iterable, Mapping

from numpy.typing import NDArray

from passes.base import Pass
from passes.quantization.awq import ScaleForAwq
from passes.quantization.dynamic_int8 import DynamicInt8
from passes.quantization.fuse_quantize_rows import FuseQuantizeRows
from passes.quantization.insert_qdq import InsertQdq
from passes.quantization.layers import Layer
from passes.quantization.plan import DYNAMIC, STATIC, LayerPlan, PrecisionPlan
from passes.quantization.quantize_weights import WEIGHT_ONLY, QuantizeWeights
from passes.quantization.rescale import Rescaled
from passes.quantization.smooth_quant import SmoothQuant
from passes.quantization.support import Kernels, require_supported
from passes.quantization.table import CalibrationTable
from passes.standard import PassTarget
from plugins.errors import KilnError


def kernels_of(target: PassTarget) -> Kernels:
    """What runs a target's graphs: engines for decoders carry Kiln's own operators, on CUDA those in 16 bits."""
    if target.backend == "cpu":
        return "cpu-plugins" if target.decoder is not None else "cpu"
    if target.backend == "cuda" and target.decoder is not None and target.precision != "fp32":
        return "cuda-plugins"
    return target.backend


def needs_ranges(plan: LayerPlan, kernels: Kernels) -> bool:
    """Whether a layer's activations are quantised with calibrated ranges: Kiln's CUDA operators measure each row."""
    return plan.scheme in STATIC and kernels != "cuda-plugins"


def check_plan(plan: PrecisionPlan, layers: Iterable[Layer], target: PassTarget) -> None:
    """Raise KilnError for a plan that names unknown layers, or a scheme that a layer cannot have on the target."""
    known = {layer.name: layer for layer in layers}
    plan.require_layers(known)
    for name, layer_plan in plan.layers.items():
        require_supported(known[name], layer_plan, kernels_of(target))


def quantising_passes(
    plan: PrecisionPlan,
    table: CalibrationTable | None,
    moments: Mapping[str, NDArray] | None,
    target: PassTarget,
    rescaled: Rescaled | None = None,
) -> list[Pass]:
    """`moments` are second moments [depth, depth] of what enters a layer, by its name, with any common factor.
    `rescaled` takes what activations were divided by, for passes that follow.

    For Kiln's CUDA operators these are the passes over the FP32 graph only; `passes.quantize_linear` follows once it is
    bound. Raises KilnError where the plan needs a calibration table and there is none.
    """
    kernels, plans = kernels_of(target), plan.layers.values()
    rescaled = Rescaled() if rescaled is None else rescaled
    passes: list[Pass] = []
    is_static = any(needs_ranges(layer, kernels) for layer in plans)
    is_smoothed = any(layer.smooth is not None for layer in plans)
    if is_static or is_smoothed:
        if table is None:
            raise KilnError("the plan has static or smoothed layers, which need a calibration table; calibrate first")
        if is_smoothed:
            passes.append(SmoothQuant(plan, table, rescaled))
    if any(layer.rounding == "awq" and layer.scheme != "float" for layer in plans):
        passes.append(ScaleForAwq(plan, table, moments, rescaled, kernels))
    if kernels == "cuda-plugins":
        return passes
    if is_static and table is not None:
        passes.append(InsertQdq(plan, table, kernels, moments, rescaled))
    if any(layer.scheme in WEIGHT_ONLY for layer in plans):
        passes.append(QuantizeWeights(plan, kernels, moments, rescaled))
    if any(layer.scheme in DYNAMIC for layer in plans):
        passes.append(DynamicInt8(plan, kernels, moments, rescaled))
        if kernels == "cpu-plugins":
            passes.append(FuseQuantizeRows())
    return passes
