"""Names, shapes and attributes of the quantised products and of what feeds them.

Single source of truth: the passes that make them and the kernels' bindings take their names from here.

A row of activations is quantised by itself, in groups of `group_size` consecutive values (0: the whole row):
scale = max|x| / 127 over the group, q = x / scale rounded to nearest, ties to even. A group of zeros has scale 0. A row
with a NaN or an infinity has the scale NaN in that group, so that its results are NaN and nothing is hidden. A row's
result depends on that row alone, to the bit: not on the batch, nor on the threads.

Weights are integers of `bits` (8: -127..127; 4: -7..7) with one scale for each output and each group of `group_size`
consecutive values of the depth (0: all). `plugins.quant_matmul.packing` has their layout.

    kiln::QuantizeRows         x -> q, scale
    kiln::AddRmsNormQuantize   sum = x + skip; normalized as kiln::AddRmsNorm has it, quantised -> q, scale, sum
    kiln::SwiGluQuantize       gate * sigmoid(gate) * up, quantised -> q, scale
    kiln::Int8MatMul           y[m, n] = sum over groups of scale[m, g] * weight_scale[n, g] * (q . w, exact) + bias[n]
    kiln::WeightMatMul         y[m, n] = sum over k of x[m, k] * weight_scale[n, g(k)] * w[k, n] + bias[n]
"""

from plugins.spec import OperatorSpec, TensorSpec

_FLOAT = ("float32",)
_INT8 = ("int8",)
_PACKED = ("uint8",)

_QUANTISED = (
    TensorSpec("q", ("...", "k"), _INT8),
    TensorSpec("scale", ("...", "activation_groups"), _FLOAT),
)
_WEIGHTS = (
    TensorSpec("weight", ("packed_bytes",), _PACKED),
    TensorSpec("weight_scale", ("n", "groups"), _FLOAT),
    TensorSpec("bias", ("n",), _FLOAT, optional=True),
)
_RESULT = (TensorSpec("y", ("...", "n"), _FLOAT),)

QUANTIZE_ROWS = OperatorSpec(
    "QuantizeRows",
    inputs=(TensorSpec("x", ("...", "k"), _FLOAT),),
    outputs=_QUANTISED,
    attributes={"group_size": 0},
)
ADD_RMS_NORM_QUANTIZE = OperatorSpec(
    "AddRmsNormQuantize",
    inputs=(
        TensorSpec("x", ("...", "k"), _FLOAT),
        TensorSpec("skip", ("...", "k"), _FLOAT),
        TensorSpec("gamma", ("k",), _FLOAT),
    ),
    outputs=(*_QUANTISED, TensorSpec("sum", ("...", "k"), _FLOAT, optional=True)),
    attributes={"epsilon": 1e-5, "group_size": 0},
)
SWIGLU_QUANTIZE = OperatorSpec(
    "SwiGluQuantize",
    inputs=(TensorSpec("gate", ("...", "k"), _FLOAT), TensorSpec("up", ("...", "k"), _FLOAT)),
    outputs=_QUANTISED,
    attributes={"alpha": 1.0, "group_size": 0},
)
INT8_MATMUL = OperatorSpec(
    "Int8MatMul",
    inputs=(*_QUANTISED, *_WEIGHTS),
    outputs=_RESULT,
    attributes={"n": None, "bits": 8, "group_size": 0, "activation_group_size": 0},
)
WEIGHT_MATMUL = OperatorSpec(
    "WeightMatMul",
    inputs=(TensorSpec("x", ("...", "k"), _FLOAT), *_WEIGHTS),
    outputs=_RESULT,
    attributes={"n": None, "bits": 8, "group_size": 0},
)
