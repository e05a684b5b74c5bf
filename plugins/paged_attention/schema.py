"""Names, shapes and attributes of the paged-attention operator and of the graphs that carry it.

Single source of truth: the exporter, the binding pass, the kernels' bindings and the runtime take
their names from here. Semantics are those of `com.microsoft::PagedAttention` (opset 1) of ONNX
Runtime; Kiln's CPU kernel implements them as `kiln::PagedAttention` with the same input order, so that
binding a graph to a backend only changes a node's domain.

What the operator does, for every sequence s with new tokens cu[s] <= t < cu[s+1]:

1. with `do_rotary`, rotate query and key of token t at position past_seqlens[s] + (t - cu[s]);
2. write key and value of token t to flat slot `slot_mapping[t]` (block * block_size + offset) of the
   caches; -1 writes nothing;
3. attend from query t to positions 0 .. past_seqlens[s] + (t - cu[s]), read through block_table[s];
   with `local_window_size` w > 0 only to the last w of them (the token itself included).

Without `key` and `value` (both or neither), `query` holds all three side by side:
[tokens, (num_heads + 2*kv_num_heads)*head_dim].

A cache of int8 comes with a scale for each token and KV head, `k_scale` or `v_scale`, written in step 2 with the row:
max|x| / 127 over the head, after rotation; the cache holds x / scale rounded to nearest, ties to even. A row of zeros
has the scale 0, one with a NaN or an infinity the scale NaN, so that what attends to it becomes NaN and nothing is
hidden. Keys and values each have their own type. Other types have no scales.

With `compute_dtype` 1 both products take bfloat16 numbers and sum in float32: queries (rotated and multiplied by
scale / softcap or, without softcap, by scale * log2(e), since softmax is computed as powers of two), keys and values as
the caches hold them, and softmax weights 2^(s - m), m the row's highest score rounded up to an integer, are each
rounded to nearest even. Softmax itself stays float32; it divides by the sum of the rounded weights. Subnormal numbers
may be taken for zero. A kernel may keep float32 for sequences with few new tokens, where reading the cache is what
takes the time: the CPU's does up to 16 query rows per KV head, and for a single token.

All writes of one call happen before its reads, so a token may read what another one in the call wrote.

On CUDA (cuda_ort.cc) query, key, value, output and both caches have one type, float16 or bfloat16, or a cache is int8;
cos and sin are float32. Operands are multiplied as they are stored, queries once rounded after rotation, whatever
`compute_dtype` says; sums and softmax are float32. Rows of int8 are multiplied as integers, scaled afterwards; sm_90's
kernel for many new tokens first rounds what they stand for to the 16-bit type. Head sizes are 64, 96, 128 and 256,
block sizes multiples of 16, rotary_dim/2 even, the scale positive. The numbers in the index tensors are on the device
and are not checked: wrong ones give wrong results, but touch nothing outside the operands. Tokens of no sequence
(cumulative_sequence_length ends before them) are padding: nothing of theirs is written, not even their output.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

from plugins.spec import DOMAIN as DOMAIN
from plugins.spec import OperatorSpec, TensorSpec

EXPORT_DOMAIN = "com.microsoft"
"""Domain of the operator as exported; a backend's binding replaces it."""
OP_TYPE = "PagedAttention"
SINCE_VERSION = 1

_CACHE = ("float32", "float16", "bfloat16", "int8")
_CACHE_SHAPE = ("blocks", "block_size", "kv_num_heads", "head_dim")
_SCALE = (("blocks", "block_size", "kv_num_heads"), ("float32",))

INPUTS = (
    TensorSpec("query", ("tokens", "num_heads*head_dim"), ("float32",)),
    TensorSpec("key", ("tokens", "kv_num_heads*head_dim"), ("float32",), optional=True),
    TensorSpec("value", ("tokens", "kv_num_heads*head_dim"), ("float32",), optional=True),
    TensorSpec("key_cache", _CACHE_SHAPE, _CACHE),
    TensorSpec("value_cache", _CACHE_SHAPE, _CACHE),
    TensorSpec("cumulative_sequence_length", ("seqs+1",), ("int32",)),
    TensorSpec("past_seqlens", ("seqs",), ("int32",)),
    TensorSpec("block_table", ("seqs", "max_blocks"), ("int32",)),
    TensorSpec("cos_cache", ("positions", "rotary_dim/2"), ("float32",), optional=True),
    TensorSpec("sin_cache", ("positions", "rotary_dim/2"), ("float32",), optional=True),
    TensorSpec("slot_mapping", ("tokens",), ("int32",)),
    TensorSpec("k_scale", *_SCALE, optional=True),
    TensorSpec("v_scale", *_SCALE, optional=True),
)
OUTPUTS = (
    TensorSpec("output", ("tokens", "num_heads*head_dim"), ("float32",)),
    TensorSpec("key_cache_out", _CACHE_SHAPE, _CACHE),
    TensorSpec("value_cache_out", _CACHE_SHAPE, _CACHE),
    TensorSpec("k_scale_out", *_SCALE, optional=True),
    TensorSpec("v_scale_out", *_SCALE, optional=True),
)
"""Cache and scale outputs alias their inputs when both are bound to one buffer; else they are copies."""

COMPUTE_DTYPES = ("float32", "bfloat16")
"""What the attribute `compute_dtype` counts through."""

ATTRIBUTES: dict[str, int | float | None] = {
    "num_heads": None,  # required
    "kv_num_heads": None,  # required; divides num_heads
    "scale": 0.0,  # 0 means 1/sqrt(head_dim)
    "softcap": 0.0,  # 0 means none; else score = softcap * tanh(score / softcap)
    "local_window_size": -1,  # -1 means unlimited
    "do_rotary": 0,
    "rotary_interleaved": 0,  # 0: halves (x[i], x[i + d/2]); 1: pairs (x[2i], x[2i+1])
    "compute_dtype": 0,  # what is multiplied: an index of COMPUTE_DTYPES
}
"""Attribute name to default; None marks a required one."""


PAGED_ATTENTION = OperatorSpec(OP_TYPE, INPUTS, OUTPUTS, ATTRIBUTES, SINCE_VERSION)

CacheDtype = Literal["float32", "float16", "bfloat16", "int8"]
CUDA_HEAD_SIZES = (64, 96, 128, 256)
"""That the CUDA kernels are built for."""
CUDA_BLOCK_GRAIN = 16
"""Their block sizes are multiples of it."""
CACHE_ITEMSIZE: dict[CacheDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
EXPORT_DTYPES: tuple[CacheDtype, ...] = ("float32", "float16", "bfloat16")
"""Types of cache that a graph may be exported with; a pass makes int8 of one of them."""


@dataclass(frozen=True)
class KvLayer:
    """Cache geometry of one decoder layer."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class CacheTensor:
    """A tensor of one layer's cache: graph input `name`, updated in place as output `output_name`."""

    operand: str
    """The operator's input that takes it; its output is called so too, with _out."""
    name: str
    output_name: str
    dtype: CacheDtype
    row_shape: tuple[int, ...]
    """What one token has: [kv_heads, head_dim], of scales [kv_heads]."""

    @property
    def bytes_per_token(self) -> int:
        return CACHE_ITEMSIZE[self.dtype] * prod(self.row_shape)


@dataclass(frozen=True)
class KvSpec:
    """Layout of the whole key/value cache: per layer two tensors [blocks, block_size, kv_heads, head_dim].

    One of int8 has a tensor of scales [blocks, block_size, kv_heads] beside it.
    """

    layers: tuple[KvLayer, ...]
    block_size: int
    dtype: CacheDtype
    """Of keys, and of values where `value_dtype` is None."""
    value_dtype: CacheDtype | None = None

    @property
    def dtypes(self) -> tuple[CacheDtype, CacheDtype]:
        """Of keys and of values."""
        return self.dtype, self.value_dtype or self.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of context holds, keys and values of all layers with their scales."""
        return sum(tensor.bytes_per_token for layer in range(len(self.layers)) for tensor in self.tensors(layer))

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.bytes_per_token

    def cache_shape(self, layer: int, blocks: int) -> tuple[int, int, int, int]:
        geometry = self.layers[layer]
        return (blocks, self.block_size, geometry.kv_heads, geometry.head_dim)

    def tensors(self, layer: int) -> tuple[CacheTensor, ...]:
        """Keys, values, and the scales of those that are int8."""
        geometry = self.layers[layer]
        row, heads = (geometry.kv_heads, geometry.head_dim), (geometry.kv_heads,)
        caches = zip(("key_cache", "value_cache"), cache_names(layer), cache_output_names(layer), strict=True)
        scales = zip(("k_scale", "v_scale"), scale_names(layer), scale_output_names(layer), strict=True)
        return (
            *(CacheTensor(*names, dtype, row) for names, dtype in zip(caches, self.dtypes, strict=True)),
            *(
                CacheTensor(*names, "float32", heads)
                for names, dtype in zip(scales, self.dtypes, strict=True)
                if dtype == "int8"
            ),
        )

    def tensor_shape(self, tensor: CacheTensor, blocks: int) -> tuple[int, ...]:
        """Shape of one of `tensors` in a cache of so many blocks."""
        return (blocks, self.block_size, *tensor.row_shape)


# A serving graph's own inputs and outputs; all step inputs are int32.
STEP_INPUTS: dict[str, tuple[str, ...]] = {
    "input_ids": ("tokens",),
    "position_ids": ("tokens",),
    "logits_indices": ("rows",),  # which tokens' hidden states reach the language-model head
    "cumulative_sequence_length": ("seqs+1",),
    "past_seqlens": ("seqs",),
    "block_table": ("seqs", "max_blocks"),
    "slot_mapping": ("tokens",),
}
LOGITS = "logits"
"""Output [rows, vocabulary], float32."""


def cache_names(layer: int) -> tuple[str, str]:
    """Graph inputs that hold one layer's keys and values."""
    return f"key_cache.{layer}", f"value_cache.{layer}"


def cache_output_names(layer: int) -> tuple[str, str]:
    """Graph outputs that alias `cache_names(layer)`."""
    return f"key_cache_out.{layer}", f"value_cache_out.{layer}"


def scale_names(layer: int) -> tuple[str, str]:
    """Graph inputs that hold the scales of one layer's keys and values, where those are int8."""
    return f"key_scale.{layer}", f"value_scale.{layer}"


def scale_output_names(layer: int) -> tuple[str, str]:
    """Graph outputs that alias `scale_names(layer)`."""
    return f"key_scale_out.{layer}", f"value_scale_out.{layer}"
