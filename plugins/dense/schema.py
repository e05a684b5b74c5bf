"""Names, shapes and attributes of the products with 16-bit weights, for CUDA.

Single source of truth: the passes that make them and the kernels' bindings take their names from here.

A weight is stored as torch's Linear has it, [width, depth]: one output's values of depth lie side by side. (ONNX's
MatMul has it the other way round; a pass that makes these operators transposes it, once.) Operands have one 16-bit
type, sums are float32 and rounded once.

    kiln::Linear         y = x weight^T + bias
    kiln::LinearSwiGlu   y = gate * sigmoid(gate) * up, with gate and up the first and the second half of the outputs of
                         such a product; they are not rounded in between

The depth is a multiple of 8, and so is LinearSwiGlu's width. Up to `kernel_rows` rows (0 to 32) take Kiln's kernels,
more take cuBLAS; which pays is measured for each SKU, and until then all take cuBLAS. With the kernels a row's result
depends on that row alone, to the bit: not on the others nor on their number. With cuBLAS, LinearSwiGlu does round its
two halves, and the depth and width are free.

`algorithms` says which of cuBLASLt's algorithms so many rows take, as measured on the device
(`plugins.dense.cuda_search`): "VERSION ROWS:WORDS ROWS:- ...", rows ascending, up to each of which the words of an
algorithm, in hexadecimal, or cuBLAS's own choice (-) hold; more rows take its own choice. What another version of
cuBLASLt was measured for is not taken. Empty: always its own choice.
"""

from plugins.spec import OperatorSpec, TensorSpec

_HALF = ("float16", "bfloat16")

KERNEL_ROWS = 32
"""The most that Kiln's own kernels take: kLinearRows of cuda.h."""

LINEAR = OperatorSpec(
    "Linear",
    inputs=(
        TensorSpec("x", ("...", "depth"), _HALF),
        TensorSpec("weight", ("width", "depth"), _HALF),
        TensorSpec("bias", ("width",), _HALF, optional=True),
    ),
    outputs=(TensorSpec("y", ("...", "width"), _HALF),),
    attributes={"kernel_rows": 0, "algorithms": ""},
)
LINEAR_SWIGLU = OperatorSpec(
    "LinearSwiGlu",
    inputs=(
        TensorSpec("x", ("...", "depth"), _HALF),
        TensorSpec("weight", ("2 * width", "depth"), _HALF),
        TensorSpec("bias", ("2 * width",), _HALF, optional=True),
    ),
    outputs=(TensorSpec("y", ("...", "width"), _HALF),),
    attributes={"kernel_rows": 0, "algorithms": ""},
)
