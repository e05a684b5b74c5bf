"""Kiln's CUDA products against the float64 reference, on a CUDA device."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from plugins.dense.cuda_calls import ROWS, CudaLinear
from plugins.dense.reference import linear, linear_swiglu
from plugins.errors import KilnError

from .cuda_tensors import error, loaded_library, poisoned, random, torch, wide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LIMITS = {"float16": 6e-4, "bfloat16": 4e-3}
"""Of ||y - reference|| / ||reference||: the rounding of y."""
SHAPES = [(256, 512), (1000, 1096), (51, 72), (8, 8), (128, 64), (129, 200), (4096, 14336)]
"""Widths and depths: whole tiles and steps, and not; one weight that every multiprocessor shares in."""


@pytest.fixture(scope="module", params=["best", "portable"])
def products(request: pytest.FixtureRequest) -> CudaLinear:
    return CudaLinear(loaded_library(), portable=request.param == "portable")


def run(products: CudaLinear, swiglu: bool) -> tuple[Callable[..., "torch.Tensor"], Callable[..., NDArray[np.float64]]]:
    return (products.linear_swiglu, linear_swiglu) if swiglu else (products.linear, linear)


@pytest.mark.parametrize("dtype", sorted(LIMITS))
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("width", "depth"), SHAPES)
def test_equals_the_reference(
    products: CudaLinear, width: int, depth: int, with_bias: bool, swiglu: bool, dtype: str
) -> None:
    if swiglu and width % 8:
        pytest.skip("SwiGLU needs a width of whole eights")
    kernel, reference = run(products, swiglu)
    weight_rows = 2 * width if swiglu else width
    weight = random(1, dtype, weight_rows, depth, scale=depth**-0.5)
    bias = random(2, dtype, weight_rows) if with_bias else None
    for rows in (1, 3, 8, 9, 16, 17, 31, ROWS):
        x = random(rows, dtype, rows, depth)
        y = kernel(x, weight, bias, poisoned(dtype, rows, width))
        assert error(y, reference(wide(x), wide(weight), wide(bias))) < LIMITS[dtype]


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize(("width", "depth"), [(6144, 4096), (1000, 1096)])
def test_a_row_does_not_depend_on_its_neighbours(products: CudaLinear, width: int, depth: int, swiglu: bool) -> None:
    kernel, _ = run(products, swiglu)
    weight = random(1, "bfloat16", 2 * width if swiglu else width, depth, scale=depth**-0.5)
    x = random(2, "bfloat16", ROWS, depth)
    together = kernel(x, weight)
    for rows in range(1, ROWS + 1):
        assert torch.equal(kernel(x[:rows], weight), together[:rows])
    order = torch.randperm(ROWS, device="cuda")
    assert torch.equal(kernel(x[order].contiguous(), weight), together[order])
    alone = torch.cat([kernel(row, weight) for row in x.split(1)])
    assert torch.equal(alone, together)


def test_infinities_and_nans_stay_in_their_rows(products: CudaLinear) -> None:
    weight, x = random(1, "float16", 640, 512, scale=0.05), random(2, "float16", 8, 512)
    expected = products.linear(x, weight).clone()
    x[3, 100], x[5, 7] = float("inf"), float("nan")
    y = products.linear(x, weight)
    kept = [0, 1, 2, 4, 6, 7]
    assert torch.equal(y[kept], expected[kept])
    assert not torch.isfinite(y[3]).any()
    assert torch.isnan(y[5]).all()


def test_sums_of_zero_are_zero(products: CudaLinear) -> None:
    """Blocks that share a tile tell by a sum that is not +0 that it has come."""
    weight = torch.zeros(256, 4096, dtype=torch.float16, device="cuda")
    for _ in range(3):
        y = products.linear(random(1, "float16", 5, 4096), weight, None, poisoned("float16", 5, 256))
        assert torch.equal(y, torch.zeros_like(y))


def test_a_captured_graph_reads_new_inputs(products: CudaLinear) -> None:
    weights = [random(seed, "bfloat16", 4096, 4096, scale=4096**-0.5) for seed in (1, 2, 3)]
    x = random(4, "bfloat16", 4, 4096)

    def chain() -> "torch.Tensor":
        y = x
        for weight in weights:
            y = products.linear(y, weight)
        return y

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for seed in (5, 6):
        x.copy_(random(seed, "bfloat16", 4, 4096))
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, chain())


@pytest.mark.parametrize("dtype", sorted(LIMITS))
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_more_rows_by_the_library(products: CudaLinear, with_bias: bool, swiglu: bool, dtype: str) -> None:
    rows, width, depth = 100, 136, 72
    reference = linear_swiglu if swiglu else linear
    weight_rows = 2 * width if swiglu else width
    x, weight = random(1, dtype, rows, depth), random(2, dtype, weight_rows, depth, scale=depth**-0.5)
    bias = random(3, dtype, weight_rows) if with_bias else None
    y = products.by_library(x, weight, bias, poisoned(dtype, rows, width), swiglu)
    assert error(y, reference(wide(x), wide(weight), wide(bias))) < 2 * LIMITS[dtype]


@pytest.mark.parametrize(
    ("rows", "width", "depth", "swiglu", "message"),
    [
        (ROWS + 1, 64, 64, False, "rows: expected 0 to 32"),
        (1, 64, 63, False, "depth: expected a multiple of 8"),
        (1, 12, 64, True, "width: expected a multiple of 8"),
    ],
)
def test_what_the_kernels_cannot_do(
    products: CudaLinear, rows: int, width: int, depth: int, swiglu: bool, message: str
) -> None:
    kernel, _ = run(products, swiglu)
    weight = random(1, "float16", 2 * width if swiglu else width, depth)
    with pytest.raises(KilnError, match=message):
        kernel(random(2, "float16", rows, depth), weight)
