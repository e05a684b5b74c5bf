"""CUDA products with weights of 8 or 4 bits against the float64 reference, on a CUDA device."""

import numpy as np
import pytest
from numpy.typing import NDArray

from plugins.dense.reference import linear, linear_swiglu
from plugins.errors import KilnError
from plugins.quant_matmul.cuda_calls import CudaQuantLinear, QuantWeight
from plugins.quant_matmul.cuda_packing import pack, quantize, quantized_rows, restored
from plugins.quant_matmul.cuda_schema import EQUAL_ROWS, FEW_ROWS, FORMATS, KERNEL_ROWS, WeightFormat

from .cuda_tensors import error, loaded_library, poisoned, random, torch, wide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LIMITS = {"float16": 6e-4, "bfloat16": 4e-3}
"""Of ||y - reference|| / ||reference||: the rounding of y."""
SHAPES = [(256, 512), (1000, 1088), (56, 96), (8, 32), (136, 160), (129, 416), (4096, 14336)]
"""Widths and depths: whole tiles and units, and not; one weight that every multiprocessor shares in."""


@pytest.fixture(scope="module", params=["best", "portable"])
def products(request: pytest.FixtureRequest) -> CudaQuantLinear:
    return CudaQuantLinear(loaded_library(), portable=request.param == "portable")


def weight_of(seed: int, form: WeightFormat, rows: int, depth: int, group: int = 0) -> tuple[QuantWeight, NDArray]:
    """A packed weight, and what it stands for."""
    values = np.random.default_rng(seed).standard_normal((rows, depth)).astype(np.float32) * depth**-0.5
    w, scales = quantize(values, form, group)
    packed = torch.from_numpy(pack(w, form)).cuda()
    return QuantWeight(packed, torch.from_numpy(scales).cuda(), form, group), restored(w, scales, group)


@pytest.mark.parametrize("dtype", sorted(LIMITS))
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("width", "depth"), SHAPES)
def test_equals_the_reference(
    products: CudaQuantLinear, width: int, depth: int, form: WeightFormat, group: int, swiglu: bool, dtype: str
) -> None:
    if swiglu and width % 8:
        pytest.skip("SwiGLU needs a width of whole eights")
    if swiglu and depth > 10000:
        pytest.skip("large weights are tried without SwiGLU")
    weight_rows = 2 * width if swiglu else width
    weight, values = weight_of(1, form, weight_rows, depth, group)
    bias = random(2, dtype, weight_rows) if group else None
    for rows in (1, 8, 9, 16, 31, 33, KERNEL_ROWS, KERNEL_ROWS + 3):
        x = random(rows, dtype, rows, depth)
        y = products.linear(x, weight, bias, poisoned(dtype, rows, width), swiglu)
        expected = (linear_swiglu if swiglu else linear)(wide(x), values, wide(bias))
        assert error(y, expected) < LIMITS[dtype]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("width", "depth"), [(6144, 4096), (1000, 1088)])
@pytest.mark.parametrize("few_rows", [0, FEW_ROWS])
@pytest.mark.parametrize("portable", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(
    portable: bool, few_rows: int, width: int, depth: int, form: WeightFormat
) -> None:
    products = CudaQuantLinear(loaded_library(), portable, few_rows)
    weight, _ = weight_of(1, form, width, depth)
    most = few_rows or EQUAL_ROWS
    x = random(2, "bfloat16", most, depth)
    together = products.linear(x, weight)
    for rows in (1, 2, 3, 7, 8, 15, 17, 31):
        if rows < most:
            assert torch.equal(products.linear(x[:rows], weight), together[:rows])
    order = torch.randperm(most, device="cuda")
    assert torch.equal(products.linear(x[order].contiguous(), weight), together[order])


@pytest.mark.parametrize("dtype", sorted(LIMITS))
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("width", [8, 2056, 3000, 9000, 20000, 30000])
def test_few_rows_of_int8_weights(products: CudaQuantLinear, width: int, swiglu: bool, dtype: str) -> None:
    depth = 16 * 70
    weight, values = weight_of(1, "int8", 2 * width if swiglu else width, depth)
    bias = random(2, dtype, len(values))
    x = random(3, dtype, FEW_ROWS, depth)
    x[1] *= 1e-3  # each row has a scale of its own, and one value may be far larger than the others
    x[2, 5] = 100
    for rows in range(1, FEW_ROWS + 1):
        y = products.linear(x[:rows], weight, bias, poisoned(dtype, rows, width), swiglu)
        expected = (linear_swiglu if swiglu else linear)(wide(x[:rows]), values, wide(bias))
        for row in range(rows):
            assert error(y[row], expected[row]) < LIMITS[dtype]


def test_few_rows_that_are_no_numbers(products: CudaQuantLinear) -> None:
    weight, _ = weight_of(1, "int8", 640, 512)
    x = random(2, "float16", FEW_ROWS, 512)
    expected = products.linear(x, weight).clone()
    x[0], x[1, 100], x[2, 7] = 0, float("inf"), float("nan")
    y = products.linear(x, weight)
    assert torch.equal(y[0], torch.zeros_like(y[0]))
    assert not torch.isfinite(y[1]).all()
    assert torch.isnan(y[2]).all()
    assert torch.equal(y[3], expected[3])


@pytest.mark.parametrize("form", FORMATS)
def test_infinities_and_nans_stay_in_their_rows(products: CudaQuantLinear, form: WeightFormat) -> None:
    weight, _ = weight_of(1, form, 640, 512)
    x = random(2, "float16", 8, 512)
    expected = products.linear(x, weight).clone()
    x[3, 100], x[5, 7] = float("inf"), float("nan")
    y = products.linear(x, weight)
    kept = [0, 1, 2, 4, 6, 7]
    assert torch.equal(y[kept], expected[kept])
    assert not torch.isfinite(y[3]).all()
    assert torch.isnan(y[5]).all()


def test_a_captured_graph_reads_new_inputs(products: CudaQuantLinear) -> None:
    weights = [weight_of(seed, "int8", 2048, 2048)[0] for seed in (1, 2, 3)]
    x = random(4, "bfloat16", 4, 2048)

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
        x.copy_(random(seed, "bfloat16", 4, 2048))
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, chain())


@pytest.mark.parametrize("dtype", sorted(LIMITS))
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("form", ["int8", "float8e4m3fn"])
def test_quantised_rows(
    products: CudaQuantLinear, form: WeightFormat, with_bias: bool, swiglu: bool, dtype: str
) -> None:
    if form == "float8e4m3fn" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this device has no products of float8")
    width, depth = 272, 1040
    weight_rows = 2 * width if swiglu else width
    weight, values = weight_of(1, form, weight_rows, depth)
    bias = random(2, dtype, weight_rows) if with_bias else None
    for rows in (1, 17, 100):
        x = random(rows, dtype, rows, depth)
        x[0] *= 0.1
        y = products.w8a8(x, weight, bias, poisoned(dtype, rows, width), swiglu)
        expected = (linear_swiglu if swiglu else linear)(quantized_rows(wide(x), form), values, wide(bias))
        assert error(y, expected) < (3 if swiglu else 1.2) * LIMITS[dtype]
        assert error(y[:1], expected[:1]) < (3 if swiglu else 1.2) * LIMITS[dtype]


def test_quantised_rows_that_are_no_numbers(products: CudaQuantLinear) -> None:
    weight, _ = weight_of(1, "int8", 64, 128)
    x = random(3, "float16", 4, 128)
    x[0], x[1, 5], x[2, 9] = 0, float("nan"), float("inf")
    y = products.w8a8(x, weight)
    assert torch.equal(y[0], torch.zeros_like(y[0]))
    assert torch.isnan(y[1:3]).all()
    assert torch.isfinite(y[3]).all()


@pytest.mark.parametrize(
    ("width", "depth", "form", "swiglu", "message"),
    [
        (64, 40, "int8", False, "depth: expected a multiple of 16"),
        (64, 48, "int4", False, "depth: expected a multiple of 32"),
        (12, 64, "int8", True, "width: expected a multiple of 8"),
    ],
)
def test_what_the_kernels_cannot_do(
    products: CudaQuantLinear, width: int, depth: int, form: WeightFormat, swiglu: bool, message: str
) -> None:
    rows = 2 * width if swiglu else width
    packed = torch.zeros(rows, depth // (2 if form == "int4" else 1), dtype=torch.uint8, device="cuda")
    weight = QuantWeight(packed, torch.ones(1, rows, device="cuda"), form)
    with pytest.raises(KilnError, match=message):
        products.linear(random(2, "float16", 1, depth), weight, swiglu=swiglu)
