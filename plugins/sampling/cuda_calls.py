"""Calls the CUDA library's sampling operators on torch tensors, through their C entries: for tests and benchmarks.

Outputs are allocated by torch unless given; a call goes to torch's current stream and can be captured in a CUDA graph.
torch is imported where it is used. Knows neither ONNX Runtime nor how the library is built.
"""

import ctypes
from typing import TYPE_CHECKING

from plugins.errors import KilnError

if TYPE_CHECKING:
    import torch


class _Sample(ctypes.Structure):
    """kiln::cuda::Sample (cuda.h)."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "temperature", "top_k", "top_p", "min_p", "seed")),
        *((name, ctypes.c_void_p) for name in ("position", "tokens")),
        *((name, ctypes.c_int64) for name in ("rows", "vocabulary")),
        ("type", ctypes.c_int),
    ]


class _FeedTokens(ctypes.Structure):
    """kiln::cuda::FeedTokens (cuda.h)."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("ids", "feed", "previous", "fed")),
        *((name, ctypes.c_int64) for name in ("tokens", "max_rows")),
    ]


class CudaSampling:
    """The sampling operators of one library."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library

    def sample(self, *operands: "torch.Tensor", out: "torch.Tensor | None" = None) -> "torch.Tensor":
        """Tokens [rows] of `kiln::Sample`'s operands in its order: logits [rows, vocabulary], the rest [rows]."""
        import torch

        logits = operands[0]
        rows, vocabulary = logits.shape
        tokens = torch.empty(rows, dtype=torch.int32, device=logits.device) if out is None else out
        types = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
        pointers = (tensor.data_ptr() for tensor in (*operands, tokens))
        self._run("kiln_cuda_sample", _Sample(*pointers, rows, vocabulary, types[logits.dtype]))
        return tokens

    def feed_tokens(
        self,
        ids: "torch.Tensor",
        feed: "torch.Tensor",
        previous: "torch.Tensor",
        out: "torch.Tensor | None" = None,
    ) -> "torch.Tensor":
        """Ids [tokens], those with a feed taken from `previous`."""
        fed = ids.new_empty(ids.shape) if out is None else out
        pointers = (tensor.data_ptr() for tensor in (ids, feed, previous, fed))
        self._run("kiln_cuda_feed_tokens", _FeedTokens(*pointers, len(ids), len(previous)))
        return fed

    def _run(self, entry: str, call: ctypes.Structure) -> None:
        import torch

        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if error := getattr(self._library, entry)(ctypes.byref(call), stream):
            raise KilnError(f"{entry} failed: CUDA error {error}")
