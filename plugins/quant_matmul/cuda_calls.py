"""Calls the CUDA library's products with weights of 8 or 4 bits on torch tensors: for tests, benchmarks and tuning.

A call goes to torch's current stream and can be captured in a CUDA graph. torch is imported where it is used. Knows
neither ONNX Runtime nor how the library is built.
"""

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numpy.typing import NDArray

from plugins.errors import KilnError
from plugins.quant_matmul.cuda_packing import pack, quantize
from plugins.quant_matmul.cuda_schema import FEW_ROWS, FORMATS, WeightFormat

if TYPE_CHECKING:
    import torch


class _QuantLinear(ctypes.Structure):
    """kiln::cuda::QuantLinear (cuda.h)."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "scale", "bias", "y", "scratch")),
        *((name, ctypes.c_int64) for name in ("rows", "depth", "width", "group", "few_rows")),
        ("swiglu", ctypes.c_bool),
        ("element", ctypes.c_int),
        ("format", ctypes.c_int),
    ]


class _QuantBuffers(ctypes.Structure):
    """kiln::cuda::QuantBuffers (cuda_library.h)."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("q", "row_scale", "sums")]


@dataclass(frozen=True)
class QuantWeight:
    """A packed weight on the device: bytes [weight rows, ...], scales [groups, weight rows]."""

    packed: "torch.Tensor"
    scale: "torch.Tensor"
    form: WeightFormat
    group_size: int = 0


def quantized_weight(weight: NDArray, form: WeightFormat, group_size: int = 0) -> QuantWeight:
    """weight [weight rows, depth] quantised and packed, on the current device."""
    import torch

    w, scales = quantize(weight, form, group_size)
    return QuantWeight(torch.from_numpy(pack(w, form)).cuda(), torch.from_numpy(scales.copy()).cuda(), form, group_size)


class CudaQuantLinear:
    """The products of one library, with scratch memory on the current device; for one stream at a time."""

    def __init__(self, library: ctypes.CDLL, portable: bool = False, few_rows: int = FEW_ROWS):
        """`portable`: the kernels for any device, where there are others for this one; `few_rows`: see the schema."""
        import torch

        self._library, self._few_rows = library, few_rows
        self._run = library.kiln_cuda_quant_linear_portable if portable else library.kiln_cuda_quant_linear
        library.kiln_cuda_quant_linear_scratch_bytes.restype = ctypes.c_size_t
        library.kiln_cuda_quant_linear_unsupported.restype = ctypes.c_char_p
        library.kiln_cuda_quant_library_create.restype = ctypes.c_void_p
        library.kiln_cuda_quant_library_run.restype = ctypes.c_char_p
        size = library.kiln_cuda_quant_linear_scratch_bytes()
        self._scratch = torch.zeros(size, dtype=torch.uint8, device="cuda")
        self._w8a8 = ctypes.c_void_p(None)

    def linear(
        self,
        x: "torch.Tensor",
        weight: QuantWeight,
        bias: "torch.Tensor | None" = None,
        out: "torch.Tensor | None" = None,
        swiglu: bool = False,
    ) -> "torch.Tensor":
        """y [rows, width] by the kernels, of x [rows, depth] as it is."""
        call, y = self._call(x, weight, bias, out, swiglu)
        if problem := self._library.kiln_cuda_quant_linear_unsupported(ctypes.byref(call)):
            raise KilnError(f"the CUDA kernels cannot do this product: {problem.decode()}")
        if error := self._run(ctypes.byref(call), ctypes.c_void_p(_stream())):
            raise KilnError(f"the product failed: CUDA error {error}")
        return y

    def w8a8(
        self,
        x: "torch.Tensor",
        weight: QuantWeight,
        bias: "torch.Tensor | None" = None,
        out: "torch.Tensor | None" = None,
        swiglu: bool = False,
    ) -> "torch.Tensor":
        """y [rows, width] by cuBLASLt, of x [rows, depth] quantised."""
        if not self._w8a8:
            self._w8a8 = ctypes.c_void_p(self._library.kiln_cuda_quant_library_create())
        if not self._w8a8:
            raise KilnError("no W8A8 products: cuBLASLt or device memory for its workspace is missing")
        call, y = self._call(x, weight, bias, out, swiglu)
        rows = (len(x) + 63) // 64 * 64  # at least padded_rows of cuda_library.h
        q = x.new_empty(rows * x.shape[1] + 4 * rows, dtype=_uint8())
        sums = x.new_empty(rows * weight.packed.shape[0] * 4, dtype=_uint8())
        after_q = q.data_ptr() + rows * x.shape[1]
        buffers = _QuantBuffers(q.data_ptr(), after_q, sums.data_ptr())
        stream = ctypes.c_void_p(_stream())
        problem = self._library.kiln_cuda_quant_library_run(
            self._w8a8, ctypes.byref(call), ctypes.byref(buffers), stream
        )
        if problem:
            raise KilnError(f"the product failed: {problem.decode()}")
        return y

    def _call(
        self,
        x: "torch.Tensor",
        weight: QuantWeight,
        bias: "torch.Tensor | None",
        out: "torch.Tensor | None",
        swiglu: bool,
    ) -> tuple[_QuantLinear, "torch.Tensor"]:
        import torch

        width = weight.packed.shape[0] // (2 if swiglu else 1)
        y = x.new_empty(x.shape[0], width) if out is None else out
        pointers = [None if t is None else t.data_ptr() for t in (x, weight.packed, weight.scale, bias, y)]
        element, form = int(x.dtype == torch.bfloat16), FORMATS.index(weight.form)
        sizes = (*x.shape, width, weight.group_size, self._few_rows)
        return _QuantLinear(*pointers, self._scratch.data_ptr(), *sizes, swiglu, element, form), y


def _uint8() -> "torch.dtype":
    import torch

    return torch.uint8


def _stream() -> int:
    import torch

    return int(torch.cuda.current_stream().cuda_stream)
