"""Weights of 8 or 4 bits as the CUDA kernels read them: quantised, and their depth in the order of tensor operands.

A row of a weight stays a row, so one copy serves the kernels for few rows and cuBLASLt for many. Within 16 values of
depth the order is 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15: each word of four holds what one thread has of a 16-bit
tensor product (PTX ISA, fragments of mma.m16n8k16). 4-bit values + 8 go eight to a word, those of two such words: the
low halves of the four pairs are its nibbles 0 to 3, the high halves its nibbles 4 to 7.

    8 bits   [width][depth] bytes
    4 bits   [width][depth / 2] bytes
    scales   [groups][width], float32
"""

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from plugins.errors import KilnError
from plugins.quant_matmul.cuda_schema import FORMATS, WeightFormat

_LARGEST: dict[WeightFormat, float] = {"int8": 127.0, "float8e4m3fn": 448.0, "int4": 7.0}
_WORDS = np.array([[2 * c, 2 * c + 1, 2 * c + 8, 2 * c + 9] for c in range(4)])
"""[word, byte]: which of 16 values of depth."""


def quantize(
    weight: NDArray, form: WeightFormat, group_size: int = 0
) -> tuple[NDArray[np.generic], NDArray[np.float32]]:
    """(w [width, depth], scales [groups, width]) nearest to weight [width, depth]: scale = max|weight| / largest w.

    w is int8, for int4 too, or float8_e4m3fn. Raises KilnError for an unknown format.
    """
    if form not in FORMATS:
        raise KilnError(f"unknown format of weights: found {form!r}, expected one of {', '.join(FORMATS)}")
    width, depth = weight.shape
    size = group_size or depth
    groups = -(-depth // size)
    padded = np.zeros((width, groups * size), np.float32)
    padded[:, :depth] = weight
    grouped = padded.reshape(width, groups, size)
    scales = np.abs(grouped).max(axis=2) / np.float32(_LARGEST[form])
    levels = (grouped / np.where(scales > 0, scales, 1)[..., None]).reshape(width, -1)[:, :depth]
    w = levels.astype(ml_dtypes.float8_e4m3fn) if form == "float8e4m3fn" else np.rint(levels).astype(np.int8)
    return w, np.ascontiguousarray(scales.T)


def pack(w: NDArray[np.generic], form: WeightFormat) -> NDArray[np.uint8]:
    """Bytes [width, depth] or, of int4, [width, depth / 2] of w [width, depth] as `quantize` has it.

    Raises KilnError where the depth is not one of whole words, or w holds what its format cannot.
    """
    whole = 32 if form == "int4" else 16
    width, depth = w.shape
    if depth % whole:
        raise KilnError(f"weights to pack have a depth of {depth}; {form} needs a multiple of {whole}")
    if form == "int4" and w.size and (int(w.min()) < -8 or int(w.max()) > 7):
        raise KilnError(f"weights to pack are {w.min()} to {w.max()}; int4 holds -8 to 7")
    ordered = w.view(np.uint8).reshape(width, depth // 16, 16)[:, :, _WORDS]  # [width, sixteens, word, byte]
    if form != "int4":
        return np.ascontiguousarray(ordered).reshape(width, depth)
    nibbles = (ordered + np.uint8(8)).reshape(width, depth // 32, 2, 4, 2, 2)  # [.., sixteen, word, pair, low or high]
    pairs = nibbles.transpose(0, 1, 3, 5, 2, 4).reshape(width, depth // 32, 4, 2, 4)  # [.., word, low or high, pair]
    packed = pairs[..., 0::2] | pairs[..., 1::2] << 4  # nibbles 2i and 2i + 1 of a word are its byte i
    return np.ascontiguousarray(packed).reshape(width, depth // 2)


def restored(w: NDArray[np.generic], scales: NDArray[np.float32], group_size: int = 0) -> NDArray[np.float64]:
    """What w [width, depth] with scales [groups, width] stands for."""
    depth = w.shape[1]
    spread = np.repeat(scales.T.astype(np.float64), group_size or depth, axis=1)[:, :depth]
    return w.astype(np.float64) * spread


def quantized_rows(x: NDArray, form: WeightFormat) -> NDArray[np.float64]:
    """What rows x [..., depth] stand for once W8A8 has quantised them."""
    rows = x.astype(np.float32)
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    top = np.float32(_LARGEST[form])
    scaled = rows * (top / np.where(largest > 0, largest, 1))
    q = scaled.astype(ml_dtypes.float8_e4m3fn) if form == "float8e4m3fn" else np.rint(scaled)
    return q.astype(np.float64) * (largest / top)


def unpack(packed: NDArray[np.uint8], form: WeightFormat) -> NDArray[np.generic]:
    """w [width, depth], int8 or float8_e4m3fn, of which `pack` makes these bytes."""
    width = len(packed)
    if form == "int4":
        pairs = np.empty((width, packed.shape[1] // 16, 4, 2, 4), np.uint8)  # [.., word, low or high, pair]
        halves = packed.reshape(width, -1, 4, 2, 2)
        pairs[..., 0::2], pairs[..., 1::2] = halves & 15, halves >> 4
        nibbles = pairs.reshape(width, -1, 4, 2, 2, 2).transpose(0, 1, 4, 2, 5, 3)  # [.., sixteen, word, pair, l or h]
        ordered = nibbles.reshape(width, -1, 4, 4) - np.uint8(8)
    else:
        ordered = packed.reshape(width, -1, 4, 4)
    values = np.empty((width, ordered.shape[1], 16), np.uint8)
    values[:, :, _WORDS] = ordered
    return values.reshape(width, -1).view(ml_dtypes.float8_e4m3fn if form == "float8e4m3fn" else np.int8)
