"""Which schemes a target has kernels for, by kind of layer, and the error for a plan that asks for another."""

from typing import Literal

from passes.quantization.cuda_schemes import FORMAT_OF, plan_problem, shape_problem
from passes.quantization.layers import Layer
from passes.quantization.plan import DYNAMIC, LayerPlan, Scheme
from plugins.errors import KilnError

Kernels = Literal["cpu", "cpu-plugins", "cuda", "cuda-plugins", "tensorrt"]
"""What runs the graph: ONNX Runtime's CPU or CUDA provider, alone or with Kiln's operators; TensorRT."""

_SCHEMES: dict[Kernels, tuple[Scheme, ...]] = {
    "cpu": ("w8a8", "w8a8-dynamic", "w8a16", "w4a16"),
    "cpu-plugins": ("w8a8", "w8a8-dynamic", "w4a8-dynamic", "w8a16", "w4a16"),
    "cuda": ("w8a8", "w8a8-dynamic", "w8a16", "w4a16", "fp8"),
    "cuda-plugins": tuple(FORMAT_OF),
    "tensorrt": ("w8a8", "fp8"),
}
_OF_CONVOLUTIONS: tuple[Scheme, ...] = ("w8a8", "fp8")
BLOCKS = (16, 32, 64, 128, 256)
"""Group sizes of com.microsoft::MatMulNBits."""
STEP = 4
"""Kiln's operators take groups of multiples of it."""


def supported_schemes(layer: Layer, kernels: Kernels) -> tuple[Scheme, ...]:
    """Besides float."""
    if kernels == "cuda-plugins":
        is_product = layer.kind == "MatMul"
        return tuple(
            s for s, form in FORMAT_OF.items() if is_product and not shape_problem(form, layer.depth, layer.width)
        )
    return tuple(s for s in _SCHEMES[kernels] if layer.kind != "Conv" or s in _OF_CONVOLUTIONS)


def require_supported(layer: Layer, plan: LayerPlan, kernels: Kernels) -> None:
    """Raise KilnError unless the target has kernels for what is planned, naming layer, scheme, target and choices."""
    where = f"layer {layer.name} ({layer.kind}) is planned as {plan.scheme}"
    known = supported_schemes(layer, kernels)
    if plan.scheme not in ("float", *known):
        raise KilnError(f"{where}, for which {kernels} has no kernel; possible are {', '.join(('float', *known))}")
    groups, wanted = plan.group_size, ""
    if kernels == "cuda-plugins":
        if plan.scheme != "float" and (problem := plan_problem(plan)):
            raise KilnError(f"{where} with {problem}")
    elif plan.scheme in ("w8a8", "fp8") or (plan.scheme == "w8a8-dynamic" and kernels != "cpu-plugins"):
        wanted = "" if groups == 0 else "0, which is one scale for each output"
    elif kernels == "cpu-plugins":
        wanted = "" if groups % STEP == 0 else f"0 or a multiple of {STEP}"
    elif plan.scheme != "float":
        wanted = "" if groups in (0, *BLOCKS) else f"0 or one of {', '.join(map(str, BLOCKS))}"
    if wanted:
        raise KilnError(f"{where} with groups of {groups}; {kernels} takes {wanted}")
    if plan.activation_group_size and (kernels != "cpu-plugins" or plan.scheme not in DYNAMIC):
        raise KilnError(f"{where} with activations in groups, which Kiln's own dynamic operators alone take")
    if plan.scheme == "fp8" and plan.rounding != "rtn":
        raise KilnError(f"{where} with {plan.rounding}; FP8 weights are rounded to nearest: plan rtn")
    if layer.kind == "Conv" and plan.rounding not in ("rtn", "hqq"):
        raise KilnError(f"{where} with {plan.rounding}, which is for matrix products; plan rtn or hqq")
