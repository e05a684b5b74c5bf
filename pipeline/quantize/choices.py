"""What each layer may become: from `int8` or `int4` and a target's kernels to plans, best first, and what is left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from passes.quantization.cuda_schemes import GROUP
from passes.quantization.layers import Layer
from passes.quantization.plan import DYNAMIC, FOUR_BITS, LayerPlan, Scheme
from passes.quantization.rewrite import kernels_of
from passes.quantization.smooth_search import INTEGER_ACTIVATIONS
from passes.quantization.support import supported_schemes
from passes.standard import PassTarget
from pipeline.quantize.config import QuantizeConfig
from plugins.errors import KilnError

_GROUP, _GROUP_OF_4_BITS = 64, 32
"""Products that share a scale where the kernels take groups: finer costs time, coarser costs accuracy."""
_FALLBACKS: Mapping[str, tuple[Scheme, ...]] = {
    "int8": ("w8a8-dynamic", "w8a8", "w8a16"),
    "int4": ("w4a8-dynamic", "w4a16", "w8a8"),
}
"""Schemes that `int8` and `int4` stand for; a layer gets the first that its kernels have."""
_OF_ENDS: Scheme = "w8a16"
"""What the first and the last layer get where their activations are to stay float and only Kiln's kernels are asked."""


@dataclass(frozen=True)
class Choices:
    """By layer, in the graph's order. `left`: layers that stay float, and why."""

    plans: Mapping[str, tuple[LayerPlan, ...]]
    left: Mapping[str, str]


def choices_for(layers: Sequence[Layer], target: PassTarget, config: QuantizeConfig) -> Choices:
    """Raises KilnError for --keep patterns that match nothing, and for a scheme that no layer can have on a target."""
    kept = set(config.kept(list(layers)))
    if config.quant == "none":
        return Choices({}, {layer.name: "" for layer in layers})
    ends = {layers[0].name, layers[-1].name} if config.keep_ends and layers else set()
    plans: dict[str, tuple[LayerPlan, ...]] = {}
    left: dict[str, str] = {}
    for layer in layers:
        known = supported_schemes(layer, kernels_of(target))
        wanted = _FALLBACKS.get(config.quant, (config.quant,))
        schemes = [scheme for scheme in wanted if scheme in known]
        if layer.name in kept:
            left[layer.name] = "kept: --keep"
        elif not schemes:
            left[layer.name] = f"a {layer.kind} has no {config.quant} here"
        elif layer.name not in ends:
            plans[layer.name] = (_plan(schemes[0], target, config),)
        elif _OF_ENDS in known and kernels_of(target) == "cpu-plugins":
            plans[layer.name] = (_plan(_OF_ENDS, target, config),)
        else:
            left[layer.name] = "kept: an end of the model"
    if not plans and any("has no" in reason for reason in left.values()):
        raise KilnError(
            f"{kernels_of(target)} has no {config.quant} for any of the {len(layers)} layers; it has "
            f"{', '.join(sorted({s for layer in layers for s in supported_schemes(layer, kernels_of(target))}))}"
        )
    return Choices(plans, left)


def _plan(scheme: Scheme, target: PassTarget, config: QuantizeConfig) -> LayerPlan:
    kernels = kernels_of(target)
    own, on_cuda = kernels == "cpu-plugins", kernels == "cuda-plugins"
    grouped = scheme in ("w8a16", "w4a16") or (scheme in DYNAMIC and own)
    usual = GROUP if on_cuda else _GROUP_OF_4_BITS if scheme in FOUR_BITS else _GROUP
    group = (usual if config.group_size is None else config.group_size) if grouped else 0
    return LayerPlan(
        scheme,
        group_size=group,
        activation_group_size=group if scheme in DYNAMIC and own else 0,
        rounding=config.rounding if scheme != "fp8" else "rtn",
        smooth=config.smooth if isinstance(config.smooth, float) and scheme in INTEGER_ACTIVATIONS else None,
    )
