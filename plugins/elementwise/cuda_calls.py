"""Calls the CUDA library's token-wise operators on torch tensors, through their C entries: for tests and benchmarks.

Outputs are allocated by torch; a call goes to torch's current stream and can be captured in a CUDA graph. torch is
imported where it is used. Knows neither ONNX Runtime nor how the library is built.
"""

import ctypes
from typing import TYPE_CHECKING

from plugins.errors import KilnError

if TYPE_CHECKING:
    import torch


class _AddRmsNorm(ctypes.Structure):
    """kiln::cuda::AddRmsNorm (cuda.h)."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "skip", "gamma", "normalized", "sum")),
        *((name, ctypes.c_int64) for name in ("rows", "hidden")),
        ("epsilon", ctypes.c_float),
        ("element", ctypes.c_int),
    ]


class _SwiGlu(ctypes.Structure):
    """kiln::cuda::SwiGlu (cuda.h)."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("gate", "up", "output")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "stride")),
        ("alpha", ctypes.c_float),
        ("element", ctypes.c_int),
    ]


class CudaElementwise:
    """The token-wise operators of one library."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library

    def add_rms_norm(
        self,
        x: "torch.Tensor",
        skip: "torch.Tensor",
        gamma: "torch.Tensor",
        epsilon: float = 1e-5,
        out: "tuple[torch.Tensor, torch.Tensor | None] | None" = None,
    ) -> "tuple[torch.Tensor, torch.Tensor | None]":
        """(normalized, sum) of x and skip [rows, hidden]; `out` may be made of the inputs, its sum left out."""
        normalized, total = (x.new_empty(x.shape), x.new_empty(x.shape)) if out is None else out
        pointers = [None if t is None else t.data_ptr() for t in (x, skip, gamma, normalized, total)]
        self._run("kiln_cuda_add_rms_norm", _AddRmsNorm(*pointers, *x.shape, epsilon, _element(x)))
        return normalized, total

    def swiglu(self, packed: "torch.Tensor", alpha: float = 1.0, out: "torch.Tensor | None" = None) -> "torch.Tensor":
        """gate * sigmoid(alpha * gate) * up of packed [rows, 2 * width], the gate first."""
        rows, width = packed.shape[0], packed.shape[1] // 2
        output = packed.new_empty(rows, width) if out is None else out
        gate = packed.data_ptr()
        up = gate + width * packed.element_size()
        call = _SwiGlu(gate, up, output.data_ptr(), rows, width, 2 * width, alpha, _element(packed))
        self._run("kiln_cuda_swiglu", call)
        return output

    def _run(self, entry: str, call: ctypes.Structure) -> None:
        import torch

        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if error := getattr(self._library, entry)(ctypes.byref(call), stream):
            raise KilnError(f"{entry} failed: CUDA error {error}")


def _element(tensor: "torch.Tensor") -> int:
    """kiln::cuda::Element of a tensor."""
    import torch

    return int(tensor.dtype == torch.bfloat16)
