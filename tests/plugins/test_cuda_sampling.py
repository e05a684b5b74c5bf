"""Kiln's CUDA sampling operators: the reference's tokens, to the bit, on a CUDA device."""

import numpy as np
import pytest
from numpy.typing import NDArray

from plugins.sampling import reference
from plugins.sampling.cuda_calls import CudaSampling

from .cuda_tensors import loaded_library, torch
from .sampling_rows import Rows, random_rows, same_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCABULARIES = [1, 7, 32, 1000, 1024, 4099, 32000, 128256]


@pytest.fixture(scope="module")
def kernels() -> CudaSampling:
    return CudaSampling(loaded_library())


def on_device(rows: Rows, dtype: str = "float32") -> list["torch.Tensor"]:
    logits, *rest = (torch.from_numpy(array).cuda() for array in rows.operands())
    return [logits.to(getattr(torch, dtype)), *rest]


def sampled(kernels: CudaSampling, operands: list["torch.Tensor"]) -> NDArray[np.int32]:
    poisoned = torch.full((len(operands[0]),), -7, dtype=torch.int32, device="cuda")
    return kernels.sample(*operands, out=poisoned).cpu().numpy()


@pytest.mark.parametrize("step", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_tokens_are_the_references(kernels: CudaSampling, vocabulary: int, step: float) -> None:
    rows = random_rows(vocabulary + int(4 * step), 100 if vocabulary < 30000 else 40, vocabulary, step)
    np.testing.assert_array_equal(sampled(kernels, on_device(rows)), reference.sample(*rows.operands()))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("vocabulary", [7, 1000, 32000])
def test_logits_of_16_bits_are_as_if_converted(kernels: CudaSampling, vocabulary: int, dtype: str) -> None:
    operands = on_device(random_rows(vocabulary, 60, vocabulary), dtype)
    wide = [tensor.float().cpu().numpy() if n == 0 else tensor.cpu().numpy() for n, tensor in enumerate(operands)]
    np.testing.assert_array_equal(sampled(kernels, operands), reference.sample(*wide))


def test_a_row_does_not_depend_on_its_neighbours(kernels: CudaSampling) -> None:
    operands = on_device(random_rows(3, 200, 5001, 0.25))
    together = sampled(kernels, operands)
    for row in range(0, 200, 7):
        assert sampled(kernels, [tensor[row : row + 1] for tensor in operands]) == together[row]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_finite_best_have_no_token(kernels: CudaSampling, temperature: float) -> None:
    inf, nan = np.inf, np.nan
    for row in ([0, nan, 1], [nan, 0, 1], [0, 1, nan], [inf, 0, 0], [-inf] * 3, [inf, nan, 0], [-inf, nan, 0]):
        assert sampled(kernels, on_device(same_row(np.array(row), 1, temperature))).tolist() == [-1], row
    assert sampled(kernels, on_device(same_row(np.array([-inf, 2, -inf]), 1, temperature))).tolist() == [1]
    long = np.zeros(50_000)
    long[49_999] = nan
    assert sampled(kernels, on_device(same_row(long, 1, temperature))).tolist() == [-1]
    assert sampled(kernels, on_device(same_row(-np.zeros(50_000), 1, 0.0))).tolist() == [0]


def test_a_cuda_graph_follows_its_operands(kernels: CudaSampling) -> None:
    operands = on_device(random_rows(1, 30, 3000))
    previous = torch.empty(30, dtype=torch.int32, device="cuda")
    kernels.sample(*operands, out=previous)
    ids, feed = (torch.arange(30, dtype=torch.int32, device="cuda") for _ in range(2))
    fed = torch.empty_like(ids)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kernels.sample(*operands, out=previous)
        kernels.feed_tokens(ids, feed, previous, fed)
    rows = random_rows(2, 30, 3000)
    for tensor, array in zip(operands, rows.operands(), strict=True):
        tensor.copy_(torch.from_numpy(array))
    graph.replay()
    expected = reference.sample(*rows.operands())
    np.testing.assert_array_equal(previous.cpu().numpy(), expected)
    np.testing.assert_array_equal(fed.cpu().numpy(), np.maximum(expected, 0))


def test_ids_are_fed_from_what_was_chosen_before(kernels: CudaSampling) -> None:
    ids = torch.arange(100, 1100, dtype=torch.int32, device="cuda")
    previous = torch.tensor([40, 50, -1], dtype=torch.int32, device="cuda")
    feed = torch.full((1000,), -1, dtype=torch.int32, device="cuda")
    feed[1], feed[2], feed[999], feed[5] = 1, 2, 0, 3  # 3 is outside: the id stays
    expected = ids.clone()
    expected[1], expected[2], expected[999] = 50, 0, 40
    assert torch.equal(kernels.feed_tokens(ids, feed, previous), expected)
