"""Which of cuBLASLt's algorithms is the fastest for a product on this device, and how a graph says so.

cuBLAS chooses by a model of the device, and misses: on an H200 by up to 17 % for 160 to 224 rows. What is measured
here becomes the attribute `algorithms` of kiln::Linear and kiln::LinearSwiGlu (schema.py). Calls the CUDA library with
memory of a `CudaRuntime`; torch is not needed. Knows no graphs.
"""

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np

from plugins.cuda_runtime import CudaRuntime
from plugins.dense.cuda_calls import LinearCall
from plugins.errors import KilnError

_GAIN = 0.02
"""Less of a product's time is noise, and not worth another algorithm than cuBLAS's."""
_MOST = 9
_CACHE = 128 << 20
"""Bytes that no L2 cache holds."""
_RANDOM = 8 << 20
"""Bytes of random numbers, which stand in memory again and again: zeros would be multiplied faster."""
_WORDS = 8


@dataclass(frozen=True)
class Product:
    """y [rows, width] = x [rows, depth] weight^T, of a gate and an up projection with `swiglu`."""

    width: int
    depth: int
    swiglu: bool
    bias: bool
    dtype: Literal["float16", "bfloat16"]

    @property
    def weight_rows(self) -> int:
        return 2 * self.width if self.swiglu else self.width


@dataclass(frozen=True)
class Timed:
    """An algorithm's words, none for cuBLAS's own choice, and microseconds of one product."""

    words: tuple[int, ...]
    microseconds: float


@dataclass(frozen=True)
class Choice:
    """What serves a product of so many rows best, and how long cuBLAS's own choice takes."""

    rows: int
    best: Timed
    usual: float


def choice_of(rows: int, timed: Sequence[Timed]) -> Choice:
    """The fastest, where it gains something; `timed` begins with cuBLAS's own choice."""
    best = min(timed, key=lambda one: one.microseconds)
    usual = timed[0]
    gains = best.microseconds < (1 - _GAIN) * usual.microseconds
    return Choice(rows, best if gains else usual, usual.microseconds)


def text_of(choices: Sequence[Choice], version: int) -> str:
    """The attribute `algorithms` for one product; empty where cuBLAS's own choice is best everywhere."""
    if not any(choice.best.words for choice in choices):
        return ""
    entries = (
        f"{choice.rows}:{'.'.join(f'{word:x}' for word in choice.best.words) or '-'}"
        for choice in sorted(choices, key=lambda one: one.rows)
    )
    return f"{version} {' '.join(entries)}"


class _Found(ctypes.Structure):
    """kiln::cuda::TimedAlgorithm (cuda_algorithms.h)."""

    _fields_ = [("words", ctypes.c_uint64 * _WORDS), ("microseconds", ctypes.c_float)]


class AlgorithmSearch:
    """A search on the device of `runtime`, which must stay open. Close it.

    `version` is cuBLASLt's. Raises KilnError without cuBLASLt or memory for its workspace.
    """

    def __init__(self, library: ctypes.CDLL, runtime: CudaRuntime):
        self._library, self._runtime = library, runtime
        library.kiln_cuda_linear_version.restype = ctypes.c_size_t
        library.kiln_cuda_linear_library_create.restype = ctypes.c_void_p
        self.version = int(library.kiln_cuda_linear_version())
        self._products = ctypes.c_void_p(library.kiln_cuda_linear_library_create())
        if not self._products:
            raise KilnError("no algorithms can be measured: cuBLASLt, or device memory for its workspace, is missing")

    def close(self) -> None:
        self._library.kiln_cuda_linear_library_destroy(self._products)
        self._products = ctypes.c_void_p(None)

    def choices(self, product: Product, rows: Sequence[int]) -> list[Choice]:
        """For each of these numbers of rows. Raises KilnError where device memory is short or the device fails."""
        return [choice_of(count, timed) for count, timed in self.timed(product, rows).items()]

    def timed(self, product: Product, rows: Sequence[int]) -> dict[int, list[Timed]]:
        """All algorithms by number of rows, cuBLAS's own choice first. Raises KilnError as `choices` does."""
        weight_bytes, most = 2 * product.weight_rows * product.depth, max(rows)
        copies = _CACHE // weight_bytes + 1
        with ExitStack() as stack:

            def filled(size: int) -> int:
                address = self._runtime.allocate(size, "measuring products")
                stack.callback(self._runtime.free, address)
                for start in range(0, size, _RANDOM):
                    self._runtime.copy(address + start, noise, min(_RANDOM, size - start))
                return address

            noise = self._runtime.allocate_host(_RANDOM, "measuring products")
            stack.callback(self._runtime.free_host, noise)
            _fill(noise, product)
            weights = [filled(weight_bytes) for _ in range(copies)]
            x, y = filled(2 * most * product.depth), filled(2 * most * product.width)
            packed = filled(2 * most * product.weight_rows) if product.swiglu else None
            bias = filled(2 * product.weight_rows) if product.bias else None
            self._runtime.synchronize()
            element = int(product.dtype == "bfloat16")
            sizes = (product.depth, product.width, product.swiglu, element)
            calls = [LinearCall(x, weights[0], bias, y, None, count, *sizes) for count in rows]
            return {count: self._timed(call, weights, packed) for count, call in zip(rows, calls, strict=True)}

    def _timed(self, call: LinearCall, weights: Sequence[int], packed: int | None) -> list[Timed]:
        found = (_Found * _MOST)()
        count = self._library.kiln_cuda_linear_library_time(
            self._products,
            ctypes.byref(call),
            (ctypes.c_void_p * len(weights))(*weights),
            len(weights),
            ctypes.c_void_p(packed),
            ctypes.c_void_p(self._runtime.address),
            found,
            _MOST,
        )
        if count < 1:
            raise KilnError(f"a product of {call.rows} rows, width {call.width}, depth {call.depth} cannot be measured")
        own, *others = found[:count]
        return [Timed((), own.microseconds), *(Timed(tuple(one.words), one.microseconds) for one in others)]


def _fill(address: int, product: Product) -> None:
    """Random numbers of the product's type, as large as make sums of its depth neither vanish nor overflow."""
    dtype = np.dtype(np.float16 if product.dtype == "float16" else ml_dtypes.bfloat16)
    values = np.random.default_rng(0).standard_normal(_RANDOM // 2, np.float32) * product.depth**-0.25
    ctypes.memmove(address, values.astype(dtype).tobytes(), _RANDOM)
