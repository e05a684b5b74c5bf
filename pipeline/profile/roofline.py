"""The roofline of the machine at hand, measured: what an operator could do at best here.

S. Williams, A. Waterman, D. Patterson: Roofline, Communications of the ACM 52(4), 2009. Two rates of reading: from
memory, and of a working set that the caches hold. Rates of products are those of ONNX Runtime's own MatMul for so many
rows, because with few rows no kernel reaches the peak; they are further ceilings below `peak`, which is that of
multiply-adds on registers. On a CUDA device the peak is that of a large product in 16 bits (`device_roofline`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pipeline.limits import product_rate
from pipeline.operator_work import Arithmetic, CallWork
from plugins.measure import fp32_peak, read_bandwidth

CACHED = 8 << 20
"""Bytes of the working set that stands for the caches."""
_INNER, _COLUMNS = 512, 1024
_ARITHMETICS: tuple[Literal["fp32", "int8"], ...] = ("fp32", "int8")
_MANY = 512
"""Rows from which more make a product no faster."""


@dataclass(frozen=True)
class Roofline:
    """Bytes/s and operations/s; `products` by arithmetic and rows, of which the next larger one is taken.

    `peak` is that of products in the arithmetic `peak_of`.
    """

    memory: float
    cache: float
    peak: float
    products: Mapping[Arithmetic, Mapping[int, float]]
    cached: int = CACHED
    """Bytes that are read at the caches' rate."""
    peak_of: Arithmetic = "fp32"
    call: float | None = None
    """Least seconds of a call with nothing to do, where that was measured."""

    @property
    def ridge(self) -> float:
        """Operations a byte from which the peak, and not memory, is the limit."""
        return self.peak / self.memory

    def product_rate(self, arithmetic: Arithmetic, rows: int) -> float:
        """The ceiling for products of so many rows; without a measurement of that arithmetic, the peak."""
        rates = self.products.get(arithmetic)
        if not rates:
            return self.peak
        fitting = min((size for size in rates if size >= rows), default=max(rates))
        return max(rate for size, rate in rates.items() if size <= fitting)  # more rows never make products slower

    def computing(self, work: CallWork) -> float:
        """Least seconds for the operations."""
        rate = self.product_rate(work.arithmetic, work.rows) if work.is_product else self.peak
        return work.operations / rate

    def moving(self, work: CallWork, streamed: bool = True) -> float:
        """Least seconds for the bytes: constants, keys and values from memory if they are `streamed`, others cached."""
        constant = (work.weights + work.cache) / (self.memory if streamed else self.cache)
        return constant + work.activations / (self.cache if work.activations <= self.cached else self.memory)

    def best(self, work: CallWork, streamed: bool = True) -> float:
        """Least seconds of the call."""
        return max(self.computing(work), self.moving(work, streamed))


def best_roofline(first: Roofline, second: Roofline) -> Roofline:
    """The higher of each of two measurements of the same: what the machine can do when nobody else uses it."""
    return replace(
        first,
        memory=max(first.memory, second.memory),
        cache=max(first.cache, second.cache),
        peak=max(first.peak, second.peak),
        call=first.call and second.call and min(first.call, second.call),
        products={
            arithmetic: {rows: max(rate, second.products[arithmetic][rows]) for rows, rate in rates.items()}
            for arithmetic, rates in first.products.items()
        },
    )


def measure_roofline(threads: int, rows: Iterable[int]) -> Roofline:
    """Of the CPU. Takes about 2 s, 0.2 s more for each number of rows, and, for a moment, 512 MiB."""
    sizes = sorted({min(1 << (count - 1).bit_length(), _MANY) for count in rows if count > 0} | {_MANY})
    memory = read_bandwidth(threads=threads)
    products: dict[Arithmetic, dict[int, float]] = {
        arithmetic: {size: product_rate(size, _INNER, _COLUMNS, threads, 0.15, arithmetic) for size in sizes}
        for arithmetic in _ARITHMETICS
    }
    return Roofline(
        memory=memory,
        cache=max(memory, read_bandwidth(CACHED, threads, repetitions=200)),
        peak=max(fp32_peak(threads), *products["fp32"].values()),
        products=products,
    )
