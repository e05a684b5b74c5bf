"""Operands of paged attention on a CUDA device, made of those of a `Case`, and what a call must leave in them."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from plugins.paged_attention import reference
from plugins.paged_attention.cuda_calls import Operands
from plugins.paged_attention.reference import Attributes, Inputs

from .conftest import NUMPY_TYPES, Case

if TYPE_CHECKING:
    import torch

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Of an output itself."""
LIMITS = {"float16": 5e-4, "bfloat16": 2e-3}
"""What an error may be beyond that, of the largest output."""
INDICES = ("cumulative_sequence_length", "past_seqlens", "block_table", "slot_mapping")


def of_type(case: Case, dtype: str) -> Inputs:
    """The case's inputs with queries, keys and values that the type can hold, still as float32."""
    inputs = replace(case, key_dtype=dtype, value_dtype=dtype).inputs()
    rounded = {
        name: getattr(inputs, name).astype(NUMPY_TYPES[dtype]).astype(np.float32) for name in ("query", "key", "value")
    }
    return replace(inputs, **rounded)


def on_device(inputs: Inputs, packed: bool = False) -> Operands:
    import torch

    def sixteen_bits(array: NDArray) -> "torch.Tensor":
        bits = np.ascontiguousarray(array.astype(inputs.key_cache.dtype)).view(np.int16)
        return torch.from_numpy(bits.copy()).cuda().view(getattr(torch, str(inputs.key_cache.dtype)))

    rows = [inputs.query, inputs.key, inputs.value]
    tensors = (
        [sixteen_bits(np.concatenate(rows, axis=1)), None, None] if packed else [sixteen_bits(row) for row in rows]
    )
    return Operands(
        *tensors,
        *(sixteen_bits(cache) for cache in (inputs.key_cache, inputs.value_cache)),
        *(torch.from_numpy(getattr(inputs, name)).cuda() for name in INDICES),
        *(None if table is None else torch.from_numpy(table).cuda() for table in (inputs.cos_cache, inputs.sin_cache)),
    )


def on_host(tensor: "torch.Tensor", like: NDArray) -> NDArray:
    import torch

    return tensor.view(torch.int16).cpu().numpy().view(like.dtype)


def poisoned(operands: Operands, attributes: Attributes) -> "torch.Tensor":
    import torch

    shape = (operands.query.shape[0], attributes.num_heads * operands.key_cache.shape[3])
    return torch.full(shape, float("nan"), dtype=operands.query.dtype, device="cuda")


def check_caches(before: Inputs, operands: Operands, attributes: Attributes) -> None:
    """Slots written within one rounding of the reference, all others bit for bit as they were; values exactly."""
    expected = reference.written(before, attributes)
    slots = np.zeros(before.key_cache.shape[:2], bool)
    slots.reshape(-1)[before.slot_mapping[before.slot_mapping >= 0]] = True
    keys, values = on_host(operands.key_cache, before.key_cache), on_host(operands.value_cache, before.key_cache)
    assert keys[~slots].tobytes() == before.key_cache[~slots].tobytes()
    assert values.tobytes() == expected.value_cache.tobytes()
    a, b = keys[slots].astype(np.float64), expected.key_cache[slots].astype(np.float64)
    spacing = 2.0**-10 if keys.dtype == np.float16 else 2.0**-7
    assert (np.abs(a - b) <= spacing * np.abs(b) + 1e-6).all()


def check_output(output: "torch.Tensor", expected: NDArray, dtype: str) -> None:
    found = output.double().cpu().numpy()
    assert not np.isnan(found).any(), "NaN leaked from slots that no token may read, or was never written"
    error = (np.abs(found - expected) - ROUNDING[dtype] * np.abs(expected)).max() / np.abs(expected).max()
    assert error <= LIMITS[dtype], f"error {error:.2e}"
