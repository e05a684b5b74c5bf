"""Weights as the CUDA kernels read them: what each thread of a warp finds where it looks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.errors import KilnError
from plugins.quant_matmul.cuda_packing import pack, quantize, quantized_rows, restored, unpack
from plugins.quant_matmul.cuda_schema import FORMATS, WeightFormat


def fragment_values(row: np.ndarray, product: int, thread: int) -> np.ndarray:
    """What thread l % 4 holds of 16 values of depth in mma.m16n8k16's first operand."""
    return row[product * 16 :][[2 * thread, 2 * thread + 1, 2 * thread + 8, 2 * thread + 9]]


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 6))
def test_bytes_stand_where_threads_look(seed: int, width: int, sixteens: int) -> None:
    w = np.random.default_rng(seed).integers(-127, 128, (width, 16 * sixteens)).astype(np.int8)
    words = pack(w, "int8").view(np.int8).reshape(width, sixteens, 4, 4)
    for product in range(sixteens):
        for thread in range(4):
            assert words[-1, product, thread].tolist() == fragment_values(w[-1], product, thread).tolist()


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 4))
def test_nibbles_stand_where_threads_look(seed: int, width: int, chunks: int) -> None:
    """A chunk of 16 bytes has the words of four threads, each for two products of 16."""
    w = np.random.default_rng(seed).integers(-8, 8, (width, 32 * chunks)).astype(np.int8)
    words = pack(w, "int4").view(np.uint32).reshape(width, chunks, 4)
    for chunk in range(chunks):
        for thread in range(4):
            word = int(words[-1, chunk, thread])
            nibbles = [(word >> 4 * i & 15) - 8 for i in range(8)]
            pairs = [value for i in range(4) for value in (nibbles[i], nibbles[i + 4])]
            expected = [fragment_values(w[-1], 2 * chunk + half, thread) for half in (0, 1)]
            assert pairs == np.concatenate(expected).tolist()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("group_size", [0, 128])
def test_quantised_weights_are_near(form: WeightFormat, group_size: int) -> None:
    weight = np.random.default_rng(1).standard_normal((9, 320)).astype(np.float32)
    weight[3] = 0
    w, scales = quantize(weight, form, group_size)
    assert scales.shape == ((3 if group_size else 1), 9)
    near = restored(w, scales, group_size)
    step = {"int8": 0.5 / 127, "int4": 0.5 / 7, "float8e4m3fn": 2.0**-4}[form]
    assert np.abs(near - weight).max() <= 1.001 * step * np.abs(weight).max()
    assert not near[3].any()


@pytest.mark.parametrize("form", ["int8", "float8e4m3fn"])
def test_quantised_rows_are_near(form: WeightFormat) -> None:
    x = np.random.default_rng(2).standard_normal((4, 64))
    x[1] = 0
    near = quantized_rows(x, form)
    step = {"int8": 0.5 / 127, "float8e4m3fn": 2.0**-4}[form]
    assert np.abs(near - x).max() <= 1.001 * step * np.abs(x).max()
    assert not near[1].any()


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(KilnError, match="depth of 24; int8 needs a multiple of 16"):
        pack(np.zeros((2, 24), np.int8), "int8")
    with pytest.raises(KilnError, match="int4 holds -8 to 7"):
        pack(np.full((2, 32), 8, np.int8), "int4")
    with pytest.raises(KilnError, match="found 'int3'"):
        quantize(np.zeros((2, 32), np.float32), "int3")  # type: ignore[arg-type]


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 4), st.sampled_from(FORMATS))
def test_what_is_packed_is_unpacked(seed: int, width: int, chunks: int, form: WeightFormat) -> None:
    w, _ = quantize(np.random.default_rng(seed).standard_normal((width, 32 * chunks)), form)
    again = unpack(pack(w, form), form)
    assert again.dtype == w.dtype
    np.testing.assert_array_equal(again.view(np.uint8), w.view(np.uint8))
