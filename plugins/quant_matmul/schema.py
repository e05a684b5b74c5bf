"""Names, shapes and attributes of the quantised products and of what feeds them.

Single source of truth: the passes that make them and the kernels' bindings take their names from here.

A row of activations is quantised by itself, in groups of `group_size` consecutive values (0: the whole row): with
largest = max|x| over the group, scale = largest / 127 and q = x * (127 / largest) rounded to nearest, ties to even,
each step in float32. A group whose largest is below 2^-100 counts as zeros: q and scale are 0. A group with a NaN or an
infinity has the scale NaN, so that its row's results are NaN and nothing is hidden; its q are 0. A row's result depends
on that row alone, to the bit: not on the batch, nor on the threads.

Weights are integers w of `bits` (8: -128..127; 4: -8..7) with one scale for each output and each group of `group_size`
consecutive values of the depth k (0: all), and perhaps a zero, any number of the same units: such a weight stands for
weight_scale * (w - zero). `plugins.quant_matmul.packing` lays all of it out as the kernels read it.

    kiln::QuantizeRows         x -> q, scale
    kiln::AddRmsNormQuantize   sum = x + skip; normalized as kiln::AddRmsNorm has it, quantised -> q, scale, sum
    kiln::SwiGluQuantize       gate * sigmoid(alpha * gate) * up, quantised -> q, scale
    kiln::Int8MatMul           y[m, n] = sum over groups of weight_scale[n, g] * (scale[m, g] * (q . w, exact)
                                         - zero[n, g] * scale[m, g] * sum of q) + bias[n]
    kiln::WeightMatMul         y[m, n] = sum over groups of weight_scale[n, g] * (x . w, in float32
                                         - zero[n, g] * sum of x) + bias[n]

The two fused ones give the bits that kiln::AddRmsNorm or kiln::SwiGlu and then kiln::QuantizeRows would. Group sizes
are 0 or multiples of 4; of Int8MatMul's two, one is 0 or both are the same, and a group is at most 131072 deep.
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
    TensorSpec("weight_scale", ("panels", "groups", "16"), _FLOAT),
    TensorSpec("bias", ("n",), _FLOAT, optional=True),
    TensorSpec("weight_zero", ("panels", "groups", "16"), _FLOAT, optional=True),
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
