"""The CUDA library's products and token-wise operators through onnxruntime-gpu, by kernels and by cuBLAS."""

from collections.abc import Callable

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from plugins.cuda_runtime import CudaRuntime
from plugins.dense.cuda_search import AlgorithmSearch, Choice, Product, text_of
from plugins.dense.reference import linear, linear_swiglu
from plugins.dense.schema import LINEAR, LINEAR_SWIGLU
from plugins.elementwise.reference import add_rms_norm, swiglu
from plugins.elementwise.schema import ADD_RMS_NORM, SWIGLU
from plugins.spec import OperatorSpec

from .cuda_node import Node
from .cuda_tensors import error, loaded_library, poisoned, random, torch, wide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif("CUDAExecutionProvider" not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
]

LIMITS = {"float16": 1.5e-3, "bfloat16": 1e-2}
"""Of ||y - reference|| / ||reference||: the rounding of y, and of what SwiGLU takes from cuBLAS."""
Reference = Callable[..., NDArray[np.float64]]


def check(y: "torch.Tensor", expected: NDArray, dtype: str) -> None:
    assert error(y, expected) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", sorted(LIMITS))
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kernel_rows", [0, 32])
@pytest.mark.parametrize(("spec", "reference"), [(LINEAR, linear), (LINEAR_SWIGLU, linear_swiglu)])
def test_products(spec: OperatorSpec, reference: Reference, kernel_rows: int, with_bias: bool, dtype: str) -> None:
    width, depth = 136, 200
    weight_rows = width if spec is LINEAR else 2 * width
    weight, bias = random(1, dtype, weight_rows, depth, scale=depth**-0.5), random(2, dtype, weight_rows)
    constants = [weight, bias] if with_bias else [weight]
    node = Node(spec, [dtype] * (1 + len(constants)), kernel_rows=kernel_rows)
    for shape in ((1,), (32,), (33,), (2, 70), (0,)):
        x = random(3, dtype, *shape, depth)
        y = poisoned(dtype, *shape, width)
        node.run([x, *constants], [y])
        if x.numel():
            check(y, reference(wide(x), *map(wide, constants)), dtype)


@pytest.mark.parametrize("dtype", sorted(LIMITS))
@pytest.mark.parametrize(("spec", "bias"), [(LINEAR, False), (LINEAR, True), (LINEAR_SWIGLU, False)])
def test_every_algorithm_that_can_be_chosen_is_right(spec: OperatorSpec, bias: bool, dtype: str) -> None:
    """For the rows it was found for, and fewer; and what another version of cuBLASLt was measured for is not taken."""
    swiglu = spec is LINEAR_SWIGLU
    product = Product(1024, 512, swiglu, bias, dtype)
    runtime = CudaRuntime()
    search = AlgorithmSearch(loaded_library(), runtime)
    try:
        timed = search.timed(product, [48, 200])
    finally:
        search.close()
        runtime.close()
    assert {rows: found[0].words for rows, found in timed.items()} == {48: (), 200: ()}
    assert all(one.microseconds > 1 for found in timed.values() for one in found)
    x, weight = random(1, dtype, 200, 512), random(2, dtype, product.weight_rows, 512, scale=512**-0.5)
    constants = [weight, random(3, dtype, product.weight_rows)] if bias else [weight]
    expected = (linear_swiglu if swiglu else linear)(wide(x), *map(wide, constants))
    bits = set()
    for rows, found in timed.items():
        for version in (search.version, search.version + 1):
            for one in found[1:]:
                text = text_of([Choice(rows, one, 1.0)], version)
                node = Node(spec, [dtype] * (1 + len(constants)), algorithms=text)
                for count in (rows, rows - 9):
                    y = poisoned(dtype, count, 1024)
                    node.run([x[:count].contiguous(), *constants], [y])
                    check(y, expected[:count], dtype)
                    bits.add((version, rows, count, y.cpu().view(torch.int16).numpy().tobytes()))
    assert sum(version != search.version for version, *_ in bits) == 4, "one result each: cuBLAS's own choice"


@pytest.mark.parametrize("text", ["x", "1 16:1.2", "1 32:- 16:-", "1 16", "1 16:g.0.0.0.0.0.0.0"])
def test_a_text_that_names_no_algorithms_is_refused(text: str) -> None:
    with pytest.raises(Exception, match="algorithms must"):
        Node(LINEAR, ["float16"] * 2, algorithms=text)


@pytest.mark.parametrize("rows", [4, 40])
def test_cuda_graph_follows_new_inputs(rows: int) -> None:
    node = Node(LINEAR_SWIGLU, ["bfloat16"] * 2, graph=True, kernel_rows=32)
    x, weight = random(1, "bfloat16", rows, 512), random(2, "bfloat16", 2048, 512, scale=0.05)
    y = torch.empty(rows, 1024, dtype=x.dtype, device="cuda")
    for seed in (3, 4, 5, 6):  # one plain run, one that captures, two replays
        x.copy_(random(seed, "bfloat16", rows, 512))
        y.fill_(float("nan"))
        node.run([x, weight], [y])
        check(y, linear_swiglu(wide(x), wide(weight)), "bfloat16")


@pytest.mark.parametrize("dtype", sorted(LIMITS))
def test_token_wise_operators(dtype: str) -> None:
    x, skip, gamma = random(1, dtype, 2, 3, 520), random(2, dtype, 2, 3, 520), random(3, dtype, 520)
    normalized, total, gated = (torch.full_like(x, float("nan")) for _ in range(3))
    Node(ADD_RMS_NORM, [dtype] * 3).run([x, skip, gamma], [normalized, total])
    assert torch.equal(total, x + skip)
    check(normalized, add_rms_norm(wide(total), np.zeros(x.shape), wide(gamma))[0], dtype)
    Node(SWIGLU, [dtype] * 2).run([x, skip], [gated])
    check(gated, swiglu(wide(x), wide(skip)), dtype)


def test_errors_name_what_is_wrong() -> None:
    node = Node(LINEAR, ["float16"] * 2, kernel_rows=32)
    y = torch.empty(1, 8, dtype=torch.float16, device="cuda")
    with pytest.raises(Exception, match="weight has the wrong shape"):
        node.run([random(1, "float16", 1, 64), random(2, "float16", 8, 32)], [y])
    with pytest.raises(Exception, match="depth: expected a multiple of 8"):
        node.run([random(1, "float16", 1, 63), random(2, "float16", 8, 63)], [y])
    with pytest.raises(Exception, match="kernel_rows must be 0"):
        Node(LINEAR, ["float16"] * 2, kernel_rows=33)
