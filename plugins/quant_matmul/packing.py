"""How quantised weights and their scales lie in memory: one layout for all instruction sets, so that a bundle's file
can be mapped and read as it is.

Outputs go in panels of 16, the depth in steps of 4. A step of a panel is 64 bytes, [16 outputs][4 products]: one vector
of AVX-512, two of AVX2. Bytes are unsigned: 8-bit weights + 128, or 4-bit weights + 8, two steps to a vector, the even
one in the low halves. What fills up the last panel and the last steps stands for weights of 0.

    8 bits   [panels][steps][16][4]
    4 bits   [panels][pairs of steps][16][4]
    scales   [panels][groups][16], float32; zeros likewise
"""

import numpy as np
from numpy.typing import NDArray

from plugins.errors import KilnError

PANEL = 16
STEP = 4
BITS = (4, 8)


def packed_bytes(k: int, n: int, bits: int) -> int:
    """Size of the packed weights [k, n]."""
    _require_bits(bits)
    return -(-n // PANEL) * _vectors(k, bits) * PANEL * STEP


def pack(weights: NDArray[np.int8], bits: int) -> NDArray[np.uint8]:
    """Packed bytes [packed_bytes] of weights [k, n] in -128..127 (8 bits) or -8..7 (4 bits).

    Raises KilnError for other values, shapes or types.
    """
    _require_bits(bits)
    if weights.ndim != 2 or weights.dtype != np.int8:
        raise KilnError(f"weights to pack are {weights.dtype} {list(weights.shape)}; expected int8 [k, n]")
    offset = 2 ** (bits - 1)
    if weights.size and (int(weights.min()) < -offset or int(weights.max()) >= offset):
        raise KilnError(
            f"weights to pack are {weights.min()} to {weights.max()}; {bits} bits hold {-offset} to {offset - 1}"
        )
    k, n = weights.shape
    panels, steps = -(-n // PANEL), _vectors(k, bits) * (8 // bits)
    padded = np.full((steps * STEP, panels * PANEL), offset, np.uint8)
    padded[:k, :n] = weights.astype(np.int16) + offset
    stepped = padded.reshape(steps, STEP, panels, PANEL).transpose(2, 0, 3, 1)
    if bits == 4:
        stepped = stepped[:, 0::2] | stepped[:, 1::2] << 4
    return np.ascontiguousarray(stepped).reshape(-1)


def unpack(packed: NDArray[np.uint8], k: int, n: int, bits: int) -> NDArray[np.int8]:
    """The weights [k, n] that `pack` was given. Raises KilnError for a wrong number of bytes."""
    if packed.shape != (packed_bytes(k, n, bits),):
        raise KilnError(
            f"packed weights have the shape {list(packed.shape)}; expected [{packed_bytes(k, n, bits)}] "
            f"for {bits} bits, k = {k}, n = {n}"
        )
    panels, vectors = -(-n // PANEL), _vectors(k, bits)
    stepped = packed.reshape(panels, vectors, PANEL, STEP)
    if bits == 4:
        stepped = np.stack([stepped & 15, stepped >> 4], axis=2).reshape(panels, 2 * vectors, PANEL, STEP)
    padded = stepped.transpose(1, 3, 0, 2).reshape(vectors * (32 // bits), panels * PANEL)
    return (padded[:k, :n].astype(np.int16) - 2 ** (bits - 1)).astype(np.int8)


def pack_scales(scales: NDArray[np.floating]) -> NDArray[np.float32]:
    """[panels, groups, 16] of scales or zeros [n, groups], filled up with 0."""
    if scales.ndim != 2:
        raise KilnError(f"scales to pack have the shape {list(scales.shape)}; expected [n, groups]")
    n, groups = scales.shape
    panels = -(-n // PANEL)
    padded = np.zeros((panels * PANEL, groups), np.float32)
    padded[:n] = scales
    return np.ascontiguousarray(padded.reshape(panels, PANEL, groups).transpose(0, 2, 1))


def unpack_scales(packed: NDArray[np.float32], n: int) -> NDArray[np.float32]:
    """The scales [n, groups] that `pack_scales` was given."""
    panels, groups, width = packed.shape
    return np.ascontiguousarray(packed.transpose(0, 2, 1).reshape(panels * width, groups)[:n])


def _vectors(k: int, bits: int) -> int:
    """Vectors of 64 bytes that a panel takes."""
    return -(-k // (STEP * 8 // bits))


def _require_bits(bits: int) -> None:
    if bits not in BITS:
        raise KilnError(f"weights of {bits} bits cannot be packed; expected 8 or 4")
