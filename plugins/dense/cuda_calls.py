"""Calls the CUDA library's products on torch tensors, through their C entries: for tests and benchmarks.

Outputs are allocated by torch; a call goes to torch's current stream and can be captured in a CUDA graph. torch is
imported where it is used. Knows neither ONNX Runtime nor how the library is built.
"""

import ctypes
from typing import TYPE_CHECKING

from plugins.errors import KilnError

if TYPE_CHECKING:
    import torch

ROWS = 32
"""kLinearRows of cuda.h: what the kernels take at most."""


class LinearCall(ctypes.Structure):
    """kiln::cuda::Linear (cuda.h)."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "y", "scratch")),
        *((name, ctypes.c_int64) for name in ("rows", "depth", "width")),
        ("swiglu", ctypes.c_bool),
        ("element", ctypes.c_int),
    ]


class CudaLinear:
    """The products of one library, with scratch memory on the current device; for one stream at a time."""

    def __init__(self, library: ctypes.CDLL, portable: bool = False):
        """`portable`: the kernels for any device, where there are others for this one."""
        import torch

        self._library = library
        self._run = library.kiln_cuda_linear_portable if portable else library.kiln_cuda_linear
        library.kiln_cuda_linear_scratch_bytes.restype = ctypes.c_size_t
        library.kiln_cuda_linear_unsupported.restype = ctypes.c_char_p
        size = library.kiln_cuda_linear_scratch_bytes()
        self._scratch = torch.zeros(size, dtype=torch.uint8, device="cuda")

    def linear(
        self,
        x: "torch.Tensor",
        weight: "torch.Tensor",
        bias: "torch.Tensor | None" = None,
        out: "torch.Tensor | None" = None,
    ) -> "torch.Tensor":
        """y [rows, width] of x [rows, depth], weight [width, depth] and bias [width]."""
        y = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
        return self._launch(x, weight, bias, y, swiglu=False)

    def linear_swiglu(
        self,
        x: "torch.Tensor",
        weight: "torch.Tensor",
        bias: "torch.Tensor | None" = None,
        out: "torch.Tensor | None" = None,
    ) -> "torch.Tensor":
        """y [rows, width] of x [rows, depth], weight [2 * width, depth] and bias [2 * width], the gate's half first."""
        y = x.new_empty(x.shape[0], weight.shape[0] // 2) if out is None else out
        return self._launch(x, weight, bias, y, swiglu=True)

    def by_library(
        self, x: "torch.Tensor", weight: "torch.Tensor", bias: "torch.Tensor | None", y: "torch.Tensor", swiglu: bool
    ) -> "torch.Tensor":
        """Either product by cuBLAS, as the operators take it for more rows. Slow: starts cuBLAS each time, waits."""
        packed = x.new_empty(x.shape[0], weight.shape[0])
        self._library.kiln_cuda_linear_library.restype = ctypes.c_char_p
        call = self._call(x, weight, bias, y, swiglu)
        stream = ctypes.c_void_p(_stream())
        problem = self._library.kiln_cuda_linear_library(ctypes.byref(call), ctypes.c_void_p(packed.data_ptr()), stream)
        if problem:
            raise KilnError(f"the product failed: {problem.decode()}")
        return y

    def _call(
        self, x: "torch.Tensor", weight: "torch.Tensor", bias: "torch.Tensor | None", y: "torch.Tensor", swiglu: bool
    ) -> LinearCall:
        import torch

        pointers = [None if t is None else t.data_ptr() for t in (x, weight, bias, y, self._scratch)]
        return LinearCall(*pointers, *x.shape, y.shape[1], swiglu, int(x.dtype == torch.bfloat16))

    def _launch(
        self, x: "torch.Tensor", weight: "torch.Tensor", bias: "torch.Tensor | None", y: "torch.Tensor", swiglu: bool
    ) -> "torch.Tensor":
        call = self._call(x, weight, bias, y, swiglu)
        if problem := self._library.kiln_cuda_linear_unsupported(ctypes.byref(call)):
            raise KilnError(f"the CUDA kernels cannot do this product: {problem.decode()}")
        if error := self._run(ctypes.byref(call), ctypes.c_void_p(_stream())):
            raise KilnError(f"the product failed: CUDA error {error}")
        return y


def _stream() -> int:
    import torch

    return int(torch.cuda.current_stream().cuda_stream)
