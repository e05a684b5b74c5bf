"""Names, shapes and attributes of the token-wise operators.

Single source of truth: the passes that make them and the kernels' bindings take their names from here.

`kiln::AddRmsNorm`: sum = x + skip, rounded to float32; normalized = sum / sqrt(mean(sum^2) + epsilon) * gamma, the mean
over the last dimension (Zhang and Sennrich, 2019). `sum` may be left out.

`kiln::SwiGlu`: output = gate * sigmoid(alpha * gate) * up, element by element (Shazeer, 2020). A sigmoid below 2^-127
counts as 0.

The CUDA library has both for operands of one 16-bit type instead, in float32 inside: `sum` is rounded to that type, and
the norm is that of the rounded sum.

A row's result, of the last dimension, depends on that row alone, to the bit: not on the batch, nor on the threads.
"""

from plugins.spec import OperatorSpec, TensorSpec

_FLOAT = ("float32",)

ADD_RMS_NORM = OperatorSpec(
    "AddRmsNorm",
    inputs=(
        TensorSpec("x", ("...", "hidden"), _FLOAT),
        TensorSpec("skip", ("...", "hidden"), _FLOAT),
        TensorSpec("gamma", ("hidden",), _FLOAT),
    ),
    outputs=(
        TensorSpec("normalized", ("...", "hidden"), _FLOAT),
        TensorSpec("sum", ("...", "hidden"), _FLOAT, optional=True),
    ),
    attributes={"epsilon": 1e-5},
)
SWIGLU = OperatorSpec(
    "SwiGlu",
    inputs=(TensorSpec("gate", ("...",), _FLOAT), TensorSpec("up", ("...",), _FLOAT)),
    outputs=(TensorSpec("output", ("...",), _FLOAT),),
    attributes={"alpha": 1.0},
)
