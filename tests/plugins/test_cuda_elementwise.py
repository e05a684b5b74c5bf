"""Kiln's CUDA token-wise operators against the float64 reference, on a CUDA device."""

import numpy as np
import pytest

from plugins.elementwise.cuda_calls import CudaElementwise
from plugins.elementwise.reference import add_rms_norm, swiglu

from .cuda_tensors import error, loaded_library, poisoned, random, torch, wide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LIMITS = {"float16": 6e-4, "bfloat16": 4e-3}
"""Of ||y - reference|| / ||reference||: the rounding of y."""
SHAPES = [(1, 4096), (7, 4096), (3, 100), (2, 8200), (5, 51), (1, 1), (4, 40000), (130, 8)]
"""Rows and their lengths: whole vectors, one to four a thread; odd ones; more than registers hold."""


@pytest.fixture(scope="module")
def kernels() -> CudaElementwise:
    return CudaElementwise(loaded_library())


@pytest.mark.parametrize("dtype", sorted(LIMITS))
@pytest.mark.parametrize(("rows", "hidden"), SHAPES)
def test_norm_equals_the_reference(kernels: CudaElementwise, rows: int, hidden: int, dtype: str) -> None:
    x, skip, gamma = random(1, dtype, rows, hidden), random(2, dtype, rows, hidden), random(3, dtype, hidden)
    out = poisoned(dtype, rows, hidden), poisoned(dtype, rows, hidden)
    normalized, total = kernels.add_rms_norm(x, skip, gamma, 1e-5, out)
    assert total is not None
    assert torch.equal(total, x + skip)
    expected, _ = add_rms_norm(wide(total), np.zeros((rows, hidden)), wide(gamma))
    assert error(normalized, expected) < LIMITS[dtype]
    without, _ = kernels.add_rms_norm(x, skip, gamma, 1e-5, (poisoned(dtype, rows, hidden), None))
    assert torch.equal(without, normalized)


@pytest.mark.parametrize(("rows", "hidden"), [(6, 4096), (6, 51)])
def test_outputs_may_take_the_inputs_place(kernels: CudaElementwise, rows: int, hidden: int) -> None:
    x, skip, gamma = (random(seed, "bfloat16", rows, hidden) for seed in (1, 2, 3))
    expected = kernels.add_rms_norm(x, skip, gamma[0].contiguous())
    for first, second in ((0, 1), (1, 0)):
        pair = (x.clone(), skip.clone())
        kernels.add_rms_norm(*pair, gamma[0].contiguous(), 1e-5, (pair[first], pair[second]))
        assert torch.equal(pair[first], expected[0])
        assert torch.equal(pair[second], expected[1])


@pytest.mark.parametrize("hidden", [4096, 51])
def test_a_row_does_not_depend_on_its_neighbours(kernels: CudaElementwise, hidden: int) -> None:
    x, skip, gamma = random(1, "bfloat16", 40, hidden), random(2, "bfloat16", 40, hidden), random(3, "bfloat16", hidden)
    together, _ = kernels.add_rms_norm(x, skip, gamma)
    for row in range(40):
        alone, _ = kernels.add_rms_norm(x[row : row + 1], skip[row : row + 1], gamma)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", sorted(LIMITS))
@pytest.mark.parametrize("alpha", [1.0, 1.702])
@pytest.mark.parametrize(("rows", "width"), [(1, 14336), (3, 8), (70, 100), (5, 51), (1, 1)])
def test_swiglu_equals_the_reference(kernels: CudaElementwise, rows: int, width: int, alpha: float, dtype: str) -> None:
    packed = random(1, dtype, rows, 2 * width) * 3
    y = kernels.swiglu(packed, alpha, poisoned(dtype, rows, width))
    assert error(y, swiglu(wide(packed[:, :width]), wide(packed[:, width:]), alpha)) < LIMITS[dtype]


def test_swiglu_of_large_gates(kernels: CudaElementwise) -> None:
    gate = torch.tensor([[-6e4, -200.0, -90.0, 90.0, 6e4, float("nan")]], dtype=torch.float16, device="cuda")
    y = kernels.swiglu(torch.cat([gate, torch.ones_like(gate)], 1))
    assert wide(y)[0, :5].tolist() == [0, 0, 0, 90, 6e4]
    assert torch.isnan(y[0, 5])
