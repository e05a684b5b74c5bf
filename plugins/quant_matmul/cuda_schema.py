"""Names, shapes and attributes of the products with weights of 8 or 4 bits, for CUDA.

Single source of truth: the passes that make them and the kernels' bindings take their names from here. They stand for
kiln::Linear and kiln::LinearSwiGlu (plugins/dense/schema.py) with the weight quantised; x, bias and y have one 16-bit
type.

    kiln::QuantLinear         y = x weight^T + bias
    kiln::QuantLinearSwiGlu   y = gate * sigmoid(gate) * up, with gate and up the two halves of such a product

A weight of row n and depth k stands for weight_scale[k / group_size, n] * w; `plugins.quant_matmul.cuda_packing` makes
both of [width, depth]. What w is depends on `format`: signed integers of 8 bits (-127..127), numbers of 8 bits with 4
of exponent and 3 of mantissa (e4m3fn, finite ones), or integers of 4 bits (-8..7).

Up to `kernel_rows` rows x is multiplied as it is: weights become 16-bit numbers on their way to the tensor cores,
exactly, and sums are float32 and rounded once. Up to 32 rows a row's result depends on that row alone, to the bit. On
Hopper up to `few_rows` rows (0 to 4) by int8 weights without groups are integers of 16 bits instead, each row by itself
with the scale max|x| / 32639; sums are exact then. That is done where it pays, for at most 32768 values of x, and the
row's last bits may differ from those it gets among more rows.
With more than `kernel_rows` rows of int8 or float8 x is quantised, too (W8A8), each row by itself with the scale
max|x| / 127 or max|x| / 448 and rounding to nearest even, as kiln::QuantizeRows does it, and cuBLASLt multiplies: int8
exactly, with int32 sums, float8 with float32 sums. int4 is multiplied by the kernels whatever the number of rows, 64 at
a time. What pays for which weight and number of rows is measured for each SKU (cuda_choice.py); until then
`kernel_rows` is 32.

The depth is a multiple of 16, of int4 of 32; groups are 0 (all of the depth) or multiples of 128; QuantLinearSwiGlu's
width is a multiple of 8. W8A8 takes group 0 and widths that are multiples of 16, and float8 from compute capability 8.9
on.
"""

from typing import Literal

from plugins.spec import OperatorSpec, TensorSpec

WeightFormat = Literal["int8", "float8e4m3fn", "int4"]
FORMATS: tuple[WeightFormat, ...] = ("int8", "float8e4m3fn", "int4")
"""What the attribute `format` counts through."""
KERNEL_ROWS = 64
"""The most that `kernel_rows` can be."""
EQUAL_ROWS = 32
"""Up to so many rows results do not depend on how many there are, but for whether they are few."""
FEW_ROWS = 4
"""The most that `few_rows` can be."""

_HALF = ("float16", "bfloat16")
_ATTRIBUTES = {"format": None, "group_size": 0, "kernel_rows": EQUAL_ROWS, "few_rows": FEW_ROWS}

QUANT_LINEAR = OperatorSpec(
    "QuantLinear",
    inputs=(
        TensorSpec("x", ("...", "depth"), _HALF),
        TensorSpec("weight", ("width", "bytes"), ("uint8",)),
        TensorSpec("weight_scale", ("groups", "width"), ("float32",)),
        TensorSpec("bias", ("width",), _HALF, optional=True),
    ),
    outputs=(TensorSpec("y", ("...", "width"), _HALF),),
    attributes=_ATTRIBUTES,
)
QUANT_LINEAR_SWIGLU = OperatorSpec(
    "QuantLinearSwiGlu",
    inputs=(
        TensorSpec("x", ("...", "depth"), _HALF),
        TensorSpec("weight", ("2 * width", "bytes"), ("uint8",)),
        TensorSpec("weight_scale", ("groups", "2 * width"), ("float32",)),
        TensorSpec("bias", ("2 * width",), _HALF, optional=True),
    ),
    outputs=(TensorSpec("y", ("...", "width"), _HALF),),
    attributes=_ATTRIBUTES,
)
