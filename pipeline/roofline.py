"""The best that a machine type could do on a model: work divided by the SKU's peak rates, whichever takes longer.

S. Williams, A. Waterman, D. Patterson: Roofline, Communications of the ACM 52(4), 2009. Rates are the SKU table's
advertised ones, so no engine reaches them; `kiln bench` measures what one does reach. Reading counts weights, and keys
and values; activations are taken to stay in the caches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from engines.sku import Precision, Sku
from pipeline.floors import DecoderWork, PlainWork

Limit = Literal["products", "reading"]


@dataclass(frozen=True)
class Point:
    """The highest rate of one way to run, in `unit`. `length` is the prompt's or the context's, in tokens."""

    way: Literal["prefill", "decode", "call"]
    batch: int
    length: int | None
    rate: float
    unit: Literal["tokens/s", "samples/s"]
    bound_by: Limit


@dataclass(frozen=True)
class Roofline:
    """Peaks that were assumed, in operations/s and bytes/s, and what follows from them."""

    precision: Precision
    peak: float
    bandwidth: float
    points: tuple[Point, ...]

    def of(self, way: str) -> list[Point]:
        return [point for point in self.points if point.way == way]

    def sentence(self) -> str:
        """For people: the shortest length only."""
        shortest = min((point.length for point in self.points if point.length), default=None)
        parts = [_words(point) for point in self.points if point.length == shortest]
        peaks = f"{self.peak / 1e12:,.1f} Top/s in {self.precision}, {self.bandwidth / 1e9:,.0f} GB/s"
        return f"at most ({peaks}): {'; '.join(parts)}"


def rate_text(rate: float) -> str:
    """Three digits."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _words(point: Point) -> str:
    rate = f"{rate_text(point.rate)} {point.unit} ({point.bound_by})"
    if point.way == "prefill":
        return f"prefill of {point.length} tokens {rate}"
    if point.way == "decode":
        return f"decode of {point.batch} at {point.length} tokens {rate}"
    return f"batch {point.batch} {rate}"


def decoder_roofline(
    work: DecoderWork, sku: Sku, precision: Precision, lengths: Sequence[int], batches: Mapping[int, int]
) -> Roofline | None:
    """Prefill of a prompt of each length; decoding of one sequence, and of `batches[length]`, that hold so much.

    None where the SKU gives no bandwidth or no peak for the precision.
    """
    peaks = _peaks(sku, precision)
    if peaks is None:
        return None
    points = []
    for length in lengths:
        points.append(_point("prefill", 1, length, work.prefill_operations(length), work.weight_bytes, length, peaks))
    for length in lengths:
        for batch in dict.fromkeys((1, batches.get(length, 0))):
            if 0 < batch <= batches.get(length, 0):
                operations, read = work.decode_operations(batch, length), work.decode_bytes(batch, length)
                points.append(_point("decode", batch, length, operations, read, batch, peaks))
    return Roofline(precision, *peaks, tuple(points))


def plain_roofline(work: PlainWork, sku: Sku, precision: Precision, batches: Sequence[int]) -> Roofline | None:
    """Calls of a model without a KV cache, by batch; None as above."""
    peaks = _peaks(sku, precision)
    if peaks is None:
        return None
    points = [
        _point("call", batch, None, work.operations * batch, work.weight_bytes, batch, peaks) for batch in batches
    ]
    return Roofline(precision, *peaks, tuple(points))


def _peaks(sku: Sku, precision: Precision) -> tuple[float, float] | None:
    peak = sku.peak.get(precision)
    return None if peak is None or sku.bandwidth is None else (peak, sku.bandwidth)


def _point(
    way: Literal["prefill", "decode", "call"],
    batch: int,
    length: int | None,
    operations: float,
    read: float,
    units: int,
    peaks: tuple[float, float],
) -> Point:
    computing, reading = operations / peaks[0], read / peaks[1]
    bound: Limit = "products" if computing > reading else "reading"
    unit: Literal["tokens/s", "samples/s"] = "samples/s" if way == "call" else "tokens/s"
    return Point(way, batch, length, units / max(computing, reading), unit, bound)
