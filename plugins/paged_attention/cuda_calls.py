"""Calls the CUDA library's paged attention on torch tensors, through its C entry: for tests and benchmarks.

A call goes to torch's current stream and can be captured in a CUDA graph. torch is imported where it is used. Knows
neither ONNX Runtime nor how the library is built.
"""

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plugins.errors import KilnError
from plugins.paged_attention.reference import Attributes

if TYPE_CHECKING:
    import torch

MEASURED = -1
"""kMeasured of cuda_attention.h."""


class _PagedAttention(ctypes.Structure):
    """kiln::cuda::PagedAttention (cuda_attention.h)."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "output", "key_cache", "value_cache")),
        *((name, ctypes.c_void_p) for name in ("key_scale", "value_scale")),
        *((name, ctypes.c_void_p) for name in ("cumulative", "past", "block_table", "slots", "cos", "sin", "scratch")),
        *((name, ctypes.c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, ctypes.c_int32) for name in ("tokens", "seqs", "blocks", "block_size", "max_blocks")),
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "head_dim", "positions", "rotary_half", "window")),
        ("decode_rows", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("element", ctypes.c_int),
        ("interleaved", ctypes.c_bool),
        ("portable", ctypes.c_bool),
    ]


@dataclass(frozen=True)
class Operands:
    """Inputs on the device, named and shaped as in `schema.INPUTS`; 16-bit, all of one type, caches perhaps int8."""

    query: "torch.Tensor"
    key: "torch.Tensor | None"
    value: "torch.Tensor | None"
    key_cache: "torch.Tensor"
    value_cache: "torch.Tensor"
    cumulative_sequence_length: "torch.Tensor"
    past_seqlens: "torch.Tensor"
    block_table: "torch.Tensor"
    slot_mapping: "torch.Tensor"
    cos_cache: "torch.Tensor | None" = None
    sin_cache: "torch.Tensor | None" = None
    k_scale: "torch.Tensor | None" = None
    v_scale: "torch.Tensor | None" = None


class CudaAttention:
    """The operator of one library, with scratch memory on the current device; for one stream at a time.

    `portable` keeps to the instructions that all architectures have.
    """

    def __init__(self, library: ctypes.CDLL, portable: bool = False):
        import torch

        self._portable = portable
        self._library = library
        library.kiln_cuda_attention_scratch_bytes.restype = ctypes.c_size_t
        library.kiln_cuda_attention_unsupported.restype = ctypes.c_char_p
        size = library.kiln_cuda_attention_scratch_bytes()
        self._scratch = torch.zeros(size, dtype=torch.uint8, device="cuda")

    def __call__(
        self,
        operands: Operands,
        attributes: Attributes,
        output: "torch.Tensor",
        decode_rows: int = MEASURED,
    ) -> None:
        """Writes output and caches. Sequences of up to `decode_rows` query rows a KV head take the decode path."""
        import torch

        call = self._call(operands, attributes, output, decode_rows)
        if problem := self._library.kiln_cuda_attention_unsupported(ctypes.byref(call)):
            raise KilnError(f"the CUDA kernels cannot do this call: {problem.decode()}")
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if error := self._library.kiln_cuda_attention(ctypes.byref(call), stream):
            raise KilnError(f"paged attention failed: CUDA error {error}")

    def _call(
        self, operands: Operands, attributes: Attributes, output: "torch.Tensor", decode_rows: int
    ) -> _PagedAttention:
        import torch

        o, a = operands, attributes
        blocks, block_size, kv_heads, head_dim = o.key_cache.shape
        stride, size = o.query.shape[1], o.query.element_size()
        query = o.query.data_ptr()
        if o.key is None or o.value is None:
            key = query + a.num_heads * head_dim * size
            value = key + kv_heads * head_dim * size
            row = stride
        else:
            key, value, row = o.key.data_ptr(), o.value.data_ptr(), kv_heads * head_dim
        cos, sin = (
            (0, 0) if o.cos_cache is None or o.sin_cache is None else (o.cos_cache.data_ptr(), o.sin_cache.data_ptr())
        )
        positions, half = (0, 0) if o.cos_cache is None else o.cos_cache.shape
        return _PagedAttention(
            *(query, key, value, output.data_ptr(), o.key_cache.data_ptr(), o.value_cache.data_ptr()),
            *(None if scale is None else scale.data_ptr() for scale in (o.k_scale, o.v_scale)),
            *(o.cumulative_sequence_length.data_ptr(), o.past_seqlens.data_ptr(), o.block_table.data_ptr()),
            *(o.slot_mapping.data_ptr(), cos, sin, self._scratch.data_ptr()),
            *(stride, row, row),
            *(o.query.shape[0], len(o.past_seqlens), blocks, block_size, o.block_table.shape[1]),
            *(a.num_heads, kv_heads, head_dim, positions, half, max(a.local_window_size, 0), decode_rows),
            *(a.scale or head_dim**-0.5, a.softcap, int(o.query.dtype == torch.bfloat16), bool(a.rotary_interleaved)),
            self._portable,
        )
