"""Operands of paged attention on a CUDA device, made of those of a `Case`, and what a call must leave in them."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from plugins.paged_attention import reference
from plugins.paged_attention.cuda_calls import MEASURED, CudaAttention, Operands
from plugins.paged_attention.reference import Attributes, Inputs

from .conftest import NUMPY_TYPES, Case

if TYPE_CHECKING:
    import torch

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Of an output itself."""
LIMITS = {"float16": 5e-4, "bfloat16": 2e-3}
"""What an error may be beyond that, of the largest output."""
INT8_LIMITS = {"float16": 1e-3, "bfloat16": 5e-3}
"""The same over caches of int8, which a kernel may restore to the 16-bit type before it multiplies."""
DECODE, PREFILL = 1 << 29, 0
"""Values of `decode_rows` that send every sequence down one path."""
INDICES = ("cumulative_sequence_length", "past_seqlens", "block_table", "slot_mapping")


def of_type(case: Case, dtype: str, int8: str = "") -> Inputs:
    """The case's inputs with queries, keys and values that the type can hold, still as float32.

    `int8` names the caches that are of that type: k, v or kv.
    """
    key_dtype, value_dtype = ("int8" if cache in int8 else dtype for cache in "kv")
    inputs = replace(case, key_dtype=key_dtype, value_dtype=value_dtype).inputs()
    rounded = {
        name: getattr(inputs, name).astype(NUMPY_TYPES[dtype]).astype(np.float32) for name in ("query", "key", "value")
    }
    return replace(inputs, **rounded)


def on_device(inputs: Inputs, packed: bool = False, dtype: str = "") -> Operands:
    """`dtype` is that of the keys' cache where it is left out."""
    import torch

    element = dtype or str(inputs.key_cache.dtype)

    def sixteen_bits(array: NDArray) -> "torch.Tensor":
        bits = np.ascontiguousarray(array.astype(NUMPY_TYPES[element])).view(np.int16)
        return torch.from_numpy(bits.copy()).cuda().view(getattr(torch, element))

    def cache(array: NDArray) -> "torch.Tensor":
        return torch.from_numpy(array.copy()).cuda() if array.dtype == np.int8 else sixteen_bits(array)

    rows = [inputs.query, inputs.key, inputs.value]
    tensors = (
        [sixteen_bits(np.concatenate(rows, axis=1)), None, None] if packed else [sixteen_bits(row) for row in rows]
    )
    floats = (inputs.cos_cache, inputs.sin_cache, inputs.k_scale, inputs.v_scale)
    return Operands(
        *tensors,
        *(cache(one) for one in (inputs.key_cache, inputs.value_cache)),
        *(torch.from_numpy(getattr(inputs, name)).cuda() for name in INDICES),
        *(None if table is None else torch.from_numpy(table.copy()).cuda() for table in floats),
    )


def on_host(tensor: "torch.Tensor", like: NDArray) -> NDArray:
    import torch

    bits = tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[like.dtype.itemsize])
    return bits.cpu().numpy().view(like.dtype)


def poisoned(operands: Operands, attributes: Attributes) -> "torch.Tensor":
    import torch

    shape = (operands.query.shape[0], attributes.num_heads * operands.key_cache.shape[3])
    return torch.full(shape, float("nan"), dtype=operands.query.dtype, device="cuda")


def after(inputs: Inputs, operands: Operands) -> Inputs:
    """The inputs with caches and scales as a call left them."""
    state = {}
    for name in ("key_cache", "value_cache", "k_scale", "v_scale"):
        before, tensor = getattr(inputs, name), getattr(operands, name)
        state[name] = None if tensor is None else on_host(tensor, before)
    return replace(inputs, **state)


def check_caches(before: Inputs, operands: Operands, attributes: Attributes) -> None:
    """Slots written within one rounding of the reference, all others bit for bit as they were; values exactly."""
    expected, found = reference.written(before, attributes), after(before, operands)
    slots = np.zeros(before.key_cache.shape[:2], bool)
    slots.reshape(-1)[before.slot_mapping[before.slot_mapping >= 0]] = True
    for name in ("key_cache", "value_cache", "k_scale", "v_scale"):
        now, old, wanted = (getattr(one, name) for one in (found, before, expected))
        if now is None:
            continue
        assert now[~slots].tobytes() == old[~slots].tobytes()
        if name == "value_cache":
            assert now.tobytes() == wanted.tobytes()
        a, b = now[slots].astype(np.float64), wanted[slots].astype(np.float64)
        spacing = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "int8": 0, "float32": 2.0**-20}[str(now.dtype)]
        assert (np.abs(a - b) <= spacing * np.abs(b) + (1 if now.dtype == np.int8 else 1e-6)).all()


def expected_output(after: Inputs, attributes: Attributes, dtype: str) -> NDArray:
    """The reference over the caches as the kernel left them, and queries rounded once they are rotated."""
    element, head_dim = NUMPY_TYPES[dtype], after.key_cache.shape[3]
    as_keys = replace(attributes, kv_num_heads=attributes.num_heads)
    slots = np.arange(len(after.query), dtype=np.int32)
    room = np.zeros((len(after.query), 1, attributes.num_heads, head_dim), element)
    alone = replace(after, key_cache=room, value_cache=room, slot_mapping=slots, k_scale=None, v_scale=None)
    rotated = reference.written(replace(alone, key=after.query, value=after.query), as_keys)
    query = rotated.key_cache.astype(np.float32).reshape(len(after.query), -1)
    return reference.attention(replace(after, query=query), replace(attributes, do_rotary=0))


def check(
    operator: CudaAttention,
    case: Case,
    dtype: str,
    decode_rows: int = MEASURED,
    packed: bool = False,
    int8: str = "",
) -> None:
    """Runs the case and compares caches and output with the reference."""
    attributes, inputs = case.attributes, of_type(case, dtype, int8)
    operands = on_device(inputs, packed, dtype)
    output = poisoned(operands, attributes)
    operator(operands, attributes, output, decode_rows)
    check_caches(inputs, operands, attributes)
    expected = expected_output(after(inputs, operands), attributes, dtype)
    check_output(output, expected, dtype, INT8_LIMITS[dtype] if int8 else LIMITS[dtype])


def check_output(output: "torch.Tensor", expected: NDArray, dtype: str, limit: float | None = None) -> None:
    found = output.double().cpu().numpy()
    assert not np.isnan(found).any(), "NaN leaked from slots that no token may read, or was never written"
    error = (np.abs(found - expected) - ROUNDING[dtype] * np.abs(expected)).max() / np.abs(expected).max()
    assert error <= (limit or LIMITS[dtype]), f"error {error:.2e}"
