"""What the sampling operators compute, in NumPy, to the bit. For tests; speed does not matter."""

import numpy as np
from numpy.typing import NDArray

from plugins.sampling.schema import NO_TOKEN

ONE = 1 << 40
"""The weight of the most likely token."""
VANISHING = 40.0
"""Halvings after which a weight is 0."""
COEFFICIENTS = (2977044448, 1031763232, 238367582, 41219527, 5548193, 493839)
"""Of 1 - f * (c0 - f * (c1 - f * (c2 - ...))), about 2^-f for f in [0, 1), in units of 2^-32."""
_LOG2_E = np.float32(1.4426950408889634)


def philox(key: int, counter: int) -> tuple[int, int, int, int]:
    """Philox4x32-10: four words of 32 bits from a 64-bit key and a 128-bit counter."""
    words = [counter >> shift & 0xFFFFFFFF for shift in (0, 32, 64, 96)]
    low, high = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [second >> 32 ^ words[1] ^ low, second & 0xFFFFFFFF, first >> 32 ^ words[3] ^ high, first & 0xFFFFFFFF]
        low, high = low + 0x9E3779B9 & 0xFFFFFFFF, high + 0xBB67AE85 & 0xFFFFFFFF
    return words[0], words[1], words[2], words[3]


def random_bits(seed: int, position: int) -> int:
    """The 64 bits of one draw."""
    low, high, _, _ = philox(seed & 0xFFFFFFFFFFFFFFFF, position & 0xFFFFFFFF)
    return high << 32 | low


def weights_of(distances: NDArray[np.float32], temperature: np.float32) -> NDArray[np.uint64]:
    """2^40 * 2^-(d * log2(e) / temperature) as integers, monotone in d."""
    with np.errstate(all="ignore"):
        scale = np.minimum(_LOG2_E / temperature, np.finfo(np.float32).max)
        x = distances * scale
        near = x < np.float32(VANISHING)  # False for NaN, too: -inf at a temperature of infinity
        fixed = (np.where(near, x, 0).astype(np.float64) * 2.0**24).astype(np.uint64)
    halvings, f = fixed >> np.uint64(24), (fixed & np.uint64(0xFFFFFF)) << np.uint64(8)
    inner = np.full(f.shape, COEFFICIENTS[-1], np.uint64)
    for coefficient in COEFFICIENTS[-2::-1]:
        inner = np.uint64(coefficient) - (f * inner >> np.uint64(32))
    power = np.uint64(1 << 31) - (f * inner >> np.uint64(33))
    return np.where(near, power << np.uint64(9) >> halvings, 0).astype(np.uint64)


def kept_weights(
    logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float
) -> NDArray[np.uint64]:
    """Weights [vocabulary] of one row, 0 for what the filters take out. The best logit must be finite."""
    with np.errstate(all="ignore"):
        distances = logits.max() - logits
    weights = weights_of(distances, np.float32(temperature))
    order = np.lexsort((np.arange(len(logits)), distances))
    kept = order[:top_k] if top_k > 0 else order
    if np.float32(top_p) < 1:
        total = int(weights[kept].sum())
        target = total * int(np.float32(max(top_p, 0)) * np.float64(2**32)) >> 32
        last = int(np.searchsorted(np.cumsum(weights[kept]), np.uint64(target)))
        kept = kept[distances[kept] <= distances[kept[last]]]
    if np.float32(min_p) > 0:
        least = int(np.minimum(np.float32(min_p), 1) * np.float64(ONE))
        kept = kept[weights[kept] >= np.uint64(least)]
    filtered = np.zeros_like(weights)
    filtered[kept] = weights[kept]
    return filtered


def sample_row(
    logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> int:
    """The token of one row [vocabulary]."""
    if not len(logits) or np.isnan(logits).any() or not np.isfinite(logits.max()):
        return NO_TOKEN
    if not np.float32(temperature) > 0:
        return int(np.argmax(logits))
    cumulative = np.cumsum(kept_weights(logits, temperature, top_k, top_p, min_p))
    target = random_bits(seed, position) * int(cumulative[-1]) >> 64
    return int(np.searchsorted(cumulative, np.uint64(target), side="right"))


def sample(
    logits: NDArray[np.float32],
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float32],
    min_p: NDArray[np.float32],
    seed: NDArray[np.int64],
    position: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Tokens [rows] of logits [rows, vocabulary]."""
    rows = zip(logits, *(x.tolist() for x in (temperature, top_k, top_p, min_p, seed, position)), strict=True)
    return np.array([sample_row(*row) for row in rows], np.int32)


def feed_tokens(
    input_ids: NDArray[np.int32], feed: NDArray[np.int32], previous: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Ids [tokens], those with a `feed` from `previous`."""
    fed = input_ids.copy()
    taken = feed >= 0
    fed[taken] = np.maximum(previous[feed[taken]], 0)
    return fed
