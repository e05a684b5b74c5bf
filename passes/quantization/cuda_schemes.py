"""Kiln's CUDA products (plugins/quant_matmul/cuda_schema.py) as schemes: what each means, and what they lack."""

from collections.abc import Mapping

from passes.quantization.plan import LayerPlan, Scheme
from plugins.quant_matmul.cuda_schema import EQUAL_ROWS, KERNEL_ROWS, WeightFormat

FORMAT_OF: Mapping[Scheme, WeightFormat] = {"w8a8-dynamic": "int8", "fp8": "float8e4m3fn", "w4a16": "int4"}
"""The schemes that there are, with the format of their weights."""
GROUP = 128
"""Groups are multiples of it, or all of the depth."""
DEFAULT_ROWS = EQUAL_ROWS
"""`kernel_rows` where nobody measured."""


def shape_problem(form: WeightFormat, depth: int, width: int) -> str | None:
    """Why a product of `width` results of `depth` terms cannot have weights of a format; None where it can."""
    grain = 32 if form == "int4" else 16
    if depth % grain:
        return f"its depth is {depth}; {form} needs a multiple of {grain}"
    if form != "int4" and width % 16:  # cuBLASLt's, which takes what is beyond `kernel_rows`
        return f"its width is {width}; {form} needs a multiple of 16"
    return None


def plan_problem(plan: LayerPlan) -> str | None:
    """What the kernels do not have of a plan with one of the schemes; None where they have it all."""
    if plan.scheme == "w4a16":
        if plan.group_size % GROUP:
            return f"groups of {plan.group_size}; expected 0 or a multiple of {GROUP}"
    elif plan.group_size:
        return f"groups of {plan.group_size}; expected 0, which is one scale for each output"
    if plan.kernel_rows is not None and not 0 <= plan.kernel_rows <= KERNEL_ROWS:
        return f"kernel_rows of {plan.kernel_rows}; expected 0 to {KERNEL_ROWS}"
    if plan.smooth is not None and plan.rounding == "gptq":
        return "both smooth and gptq, whose moments are those before smoothing; plan one of the two"
    return None
