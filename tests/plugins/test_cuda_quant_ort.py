"""Products with weights of 8 or 4 bits through onnxruntime-gpu: by the kernels, by cuBLASLt, and in CUDA graphs."""

from collections.abc import Callable

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from plugins.dense.reference import linear, linear_swiglu
from plugins.quant_matmul.cuda_packing import pack, quantize, quantized_rows, restored
from plugins.quant_matmul.cuda_schema import FORMATS, QUANT_LINEAR, QUANT_LINEAR_SWIGLU, WeightFormat
from plugins.spec import OperatorSpec

from .cuda_node import Node
from .cuda_tensors import error, poisoned, random, torch, wide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif("CUDAExecutionProvider" not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
]

LIMITS = {"float16": 2e-3, "bfloat16": 1.2e-2}
"""Of ||y - reference|| / ||reference||: the rounding of y, and of the halves that SwiGLU takes from cuBLASLt."""
WIDTH, DEPTH = 144, 224
Reference = Callable[..., NDArray[np.float64]]


def node_of(spec: OperatorSpec, dtype: str, graph: bool = False, **attributes: int) -> Node:
    """With all its inputs: rows, weight, scale and bias."""
    return Node(spec, [dtype, "uint8", "float32", dtype], graph, **attributes)


def constants(form: WeightFormat, rows: int, dtype: str) -> "tuple[list[torch.Tensor], NDArray]":
    """Weight, scale and bias, and what the weight stands for."""
    values = np.random.default_rng(1).standard_normal((rows, DEPTH)).astype(np.float32) * DEPTH**-0.5
    w, scales = quantize(values, form)
    packed, scale = torch.from_numpy(pack(w, form)).cuda(), torch.from_numpy(scales).cuda()
    return [packed, scale, random(2, dtype, rows)], restored(w, scales)


@pytest.mark.parametrize("dtype", sorted(LIMITS))
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("spec", "reference"), [(QUANT_LINEAR, linear), (QUANT_LINEAR_SWIGLU, linear_swiglu)])
def test_products(spec: OperatorSpec, reference: Reference, form: WeightFormat, dtype: str) -> None:
    rows = WIDTH if spec is QUANT_LINEAR else 2 * WIDTH
    given, values = constants(form, rows, dtype)
    node = node_of(spec, dtype, format=FORMATS.index(form), kernel_rows=32)
    for shape in ((1,), (32,), (33,), (2, 70)):
        x = random(3, dtype, *shape, DEPTH)
        y = poisoned(dtype, *shape, WIDTH)
        node.run([x, *given], [y])
        multiplied = wide(x) if form == "int4" or np.prod(shape) <= 32 else quantized_rows(wide(x), form)
        expected = reference(multiplied, values, wide(given[2]))
        assert error(y, expected) < LIMITS[dtype]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [4, 40])
def test_cuda_graph_follows_new_inputs(rows: int, form: WeightFormat) -> None:
    given, values = constants(form, 2 * WIDTH, "bfloat16")
    node = node_of(QUANT_LINEAR_SWIGLU, "bfloat16", graph=True, format=FORMATS.index(form), kernel_rows=32)
    x, y = random(1, "bfloat16", rows, DEPTH), torch.empty(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
    for seed in (3, 4, 5, 6):  # one plain run, one that captures, two replays
        x.copy_(random(seed, "bfloat16", rows, DEPTH))
        y.fill_(float("nan"))
        node.run([x, *given], [y])
        multiplied = wide(x) if form == "int4" or rows <= 32 else quantized_rows(wide(x), form)
        expected = linear_swiglu(multiplied, values, wide(given[2]))
        assert error(y, expected) < LIMITS["bfloat16"]


def test_errors_name_what_is_wrong() -> None:
    given, _ = constants("int8", WIDTH, "float16")
    y = torch.empty(1, WIDTH, dtype=torch.float16, device="cuda")
    node = node_of(QUANT_LINEAR, "float16", format=0)
    with pytest.raises(Exception, match="weight has the wrong shape"):
        node.run([random(1, "float16", 1, DEPTH // 2), *given], [y])
    with pytest.raises(Exception, match="weight_scale has the wrong shape"):
        node.run([random(1, "float16", 1, DEPTH), given[0], given[1].reshape(-1, 1), given[2]], [y])
    with pytest.raises(Exception, match="format must be 0"):
        node_of(QUANT_LINEAR, "float16", format=3)
