"""The truth about paged attention: NumPy, float64, one loop per thing that the contract in schema.py says.

Slow on purpose. Does not check its arguments and does not know of ONNX Runtime; kernels are tested against it.
"""

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Attributes:
    """The operator's attributes, named and defaulted as in `schema.ATTRIBUTES`."""

    num_heads: int
    kv_num_heads: int
    scale: float = 0.0
    softcap: float = 0.0
    local_window_size: int = -1
    do_rotary: int = 0
    rotary_interleaved: int = 0
    compute_dtype: int = 0


@dataclass(frozen=True)
class Inputs:
    """The operator's inputs, named and shaped as in `schema.INPUTS`; caches in their storage type, int8 with scales."""

    query: Array
    key: Array | None
    value: Array | None
    key_cache: Array
    value_cache: Array
    cumulative_sequence_length: Array
    past_seqlens: Array
    block_table: Array
    slot_mapping: Array
    cos_cache: Array | None = None
    sin_cache: Array | None = None
    k_scale: Array | None = None
    v_scale: Array | None = None


def paged_attention(inputs: Inputs, attributes: Attributes) -> tuple[Array, Array, Array]:
    """Output [tokens, num_heads*head_dim] in float64, and the two caches after the call in their storage type."""
    after = written(unpacked(inputs, attributes), attributes)
    return attention(after, attributes), after.key_cache, after.value_cache


def unpacked(inputs: Inputs, attributes: Attributes) -> Inputs:
    """The same inputs with key and value of their own where query holds all three."""
    if inputs.key is not None:
        return inputs
    head_dim = inputs.key_cache.shape[3]
    borders = np.cumsum([attributes.num_heads * head_dim, attributes.kv_num_heads * head_dim])
    query, key, value = np.split(inputs.query, borders, axis=1)
    return replace(inputs, query=query, key=key, value=value)


def written(inputs: Inputs, attributes: Attributes) -> Inputs:
    """The same with copies of caches and scales that hold the (rotated) keys and values of the new tokens.

    Storing rounds float64 to the storage type once, to nearest even; int8 is made of float32.
    """
    assert inputs.key is not None
    assert inputs.value is not None
    head_dim = inputs.key_cache.shape[3]
    key = inputs.key.astype(np.float64).reshape(-1, attributes.kv_num_heads, head_dim)
    value = inputs.value.astype(np.float64).reshape(-1, attributes.kv_num_heads, head_dim)
    after = replace(
        inputs,
        key_cache=inputs.key_cache.copy(),
        value_cache=inputs.value_cache.copy(),
        k_scale=None if inputs.k_scale is None else inputs.k_scale.copy(),
        v_scale=None if inputs.v_scale is None else inputs.v_scale.copy(),
    )
    for seq in range(len(inputs.past_seqlens)):
        for token, position in _new_tokens(inputs, seq):
            slot = int(inputs.slot_mapping[token])
            if slot >= 0:
                _store(after.key_cache, after.k_scale, slot, _rotated(key[token], position, inputs, attributes))
                _store(after.value_cache, after.v_scale, slot, value[token])
    return after


def _store(cache: Array, scales: Array | None, slot: int, heads: NDArray[np.float64]) -> None:
    """Write heads [kv_heads, head_dim] to a slot of a cache, in place."""
    where = divmod(slot, cache.shape[1])
    if scales is None:
        cache[where] = heads.astype(cache.dtype)
    else:
        cache[where], scales[where] = quantized(heads.astype(np.float32))


def quantized(rows: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Rows [..., n] in int8, and their scales [...]."""
    largest = np.abs(rows).max(axis=-1)
    scales = np.where(np.isfinite(largest), largest / np.float32(127), np.float32(np.nan))
    divisors = np.where(scales > 0, scales, np.float32(np.inf))[..., None]  # all of the row becomes 0
    levels = np.nan_to_num(rows, nan=0, posinf=0, neginf=0) / divisors
    return np.clip(np.rint(levels), -127, 127).astype(np.int8), scales


def attention(inputs: Inputs, attributes: Attributes) -> NDArray[np.float64]:
    """Output of the new tokens over caches that already hold them; writes nothing.

    With `compute_dtype` 1 all operands are rounded to bfloat16, however few new tokens a sequence has.
    """
    block_size, head_dim = inputs.key_cache.shape[1], inputs.key_cache.shape[3]
    group = attributes.num_heads // attributes.kv_num_heads
    scale = attributes.scale or 1.0 / np.sqrt(head_dim)
    factor = scale / attributes.softcap if attributes.softcap else scale * np.log2(np.e)
    operand, raised = (_bfloat16, np.ceil) if attributes.compute_dtype == 1 else (np.asarray, np.asarray)
    query = inputs.query.astype(np.float64).reshape(-1, attributes.num_heads, head_dim)
    output = np.zeros_like(query)
    for seq in range(len(inputs.past_seqlens)):
        for token, position in _new_tokens(inputs, seq):
            first = max(0, position + 1 - attributes.local_window_size) if attributes.local_window_size > 0 else 0
            seen = np.arange(first, position + 1)
            blocks = inputs.block_table[seq, seen // block_size]
            where = blocks, seen % block_size
            keys = _read(inputs.key_cache, inputs.k_scale, where)  # [seen, kv_heads, head_dim]
            values = _read(inputs.value_cache, inputs.v_scale, where)
            rotated = operand(_rotated(query[token], position, inputs, attributes) * factor)
            keys, values = operand(keys), operand(values)
            for head in range(attributes.num_heads):
                scores = keys[:, head // group] @ rotated[head]
                if attributes.softcap:
                    scores = attributes.softcap * np.log2(np.e) * np.tanh(scores)
                weights = operand(np.exp2(scores - raised(scores.max())))
                output[token, head] = weights @ values[:, head // group] / weights.sum()
    return output.reshape(len(output), attributes.num_heads * head_dim)


def _read(cache: Array, scales: Array | None, where: tuple[Array, Array]) -> NDArray[np.float64]:
    rows = cache[where].astype(np.float64)
    return rows if scales is None else rows * scales[where].astype(np.float64)[..., None]


def _bfloat16(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rounded to bfloat16 once, to nearest even."""
    return numbers.astype(ml_dtypes.bfloat16).astype(np.float64)


def _new_tokens(inputs: Inputs, seq: int) -> list[tuple[int, int]]:
    """(packed index, position) of each new token of a sequence."""
    begin, end = (int(i) for i in inputs.cumulative_sequence_length[seq : seq + 2])
    return [(token, int(inputs.past_seqlens[seq]) + token - begin) for token in range(begin, end)]


def _rotated(heads: NDArray[np.float64], position: int, inputs: Inputs, attributes: Attributes) -> NDArray[np.float64]:
    """Heads [n, head_dim] after rotary embedding (RoFormer, arXiv 2104.09864) at `position`."""
    if not attributes.do_rotary:
        return heads
    assert inputs.cos_cache is not None
    assert inputs.sin_cache is not None
    cos, sin = inputs.cos_cache[position].astype(np.float64), inputs.sin_cache[position].astype(np.float64)
    half = len(cos)
    if attributes.rotary_interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    out = heads.copy()
    out[:, first] = heads[:, first] * cos - heads[:, second] * sin
    out[:, second] = heads[:, second] * cos + heads[:, first] * sin
    return out
