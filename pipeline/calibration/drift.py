"""The drift report: tensors whose range depends on the length of the text, and what short data alone would cost."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from passes.quantization.table import CalibrationTable, Range
from pipeline.calibration.grid import clipped, grid_of, sqnr
from pipeline.calibration.histogram import Histogram
from pipeline.calibration.observe import Observed, TensorObservation
from pipeline.drawing import LIMIT, MUTED, SIDE_A, Plot, drawn
from pipeline.page import Page, PageTable, html_from_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRIFTS = 1.25
"""From which ratio on a tensor is said to depend on length: the range of long texts is a quarter wider."""
_SHOWN = 20
_TINY = 1e-30


@dataclass(frozen=True)
class TensorDrift:
    """One tensor that had values in the shortest and in the longest stratum."""

    tensor: str
    layers: tuple[str, ...]
    ratio: float
    """Largest magnitude of the range in the longest stratum over that in the shortest."""
    clipped: float
    """Share of the longest stratum's values that lie outside of the shortest one's range."""
    magnitudes: Mapping[str, float]
    """Of the range of each stratum."""
    sqnr: Mapping[str, Mapping[str, float]]
    """Signal to quantisation noise in dB with 8 bits: by stratum of the values, then by stratum of the range."""

    @property
    def loss(self) -> float:
        """dB that the longest stratum loses with the shortest one's range instead of its own."""
        own = self.sqnr[next(reversed(list(self.sqnr)))]
        return own[next(reversed(list(own)))] - own[next(iter(own))]


@dataclass(frozen=True)
class DriftReport:
    """Tensors by ratio, the largest first; none where all data lies in one stratum."""

    shortest: str
    longest: str
    tensors: tuple[TensorDrift, ...]

    @property
    def drifting(self) -> tuple[TensorDrift, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.ratio >= DRIFTS)

    @property
    def sentence(self) -> str:
        if not self.tensors:
            return "All data lies in one length stratum, so nothing can be said about drift."
        worst = self.tensors[0]
        return (
            f"{len(self.drifting)} of {len(self.tensors)} tensors have ranges on {self.longest} texts that are "
            f"{DRIFTS} times those on {self.shortest} ones, or more; the most {worst.ratio:.2f} times "
            f"({worst.layers[0] if worst.layers else worst.tensor})."
        )


def drift_of(observed: Observed, table: CalibrationTable) -> DriftReport:
    """Of the strata's ranges in `table`, which was made from `observed`."""
    names = [name for name, count in observed.samples.items() if count]
    shortest, longest = names[0], names[-1]
    if shortest == longest:
        return DriftReport(shortest, longest, ())
    found = [
        _drift(seen, table.of(name).strata, table.symmetric, shortest, longest)
        for name, seen in observed.tensors.items()
        if {shortest, longest} <= set(seen.strata)
    ]
    return DriftReport(shortest, longest, tuple(sorted(found, key=lambda drift: -drift.ratio)))


def _drift(
    seen: TensorObservation, ranges: Mapping[str, Range], symmetric: bool, shortest: str, longest: str
) -> TensorDrift:
    histogram = seen.strata[longest].histogram
    short = ranges[shortest]
    outside = clipped(histogram, np.array([short.low]), np.array([short.high]))
    magnitudes = {name: found.magnitude for name, found in ranges.items()}
    return TensorDrift(
        tensor=seen.observable.name,
        layers=seen.observable.layers,
        ratio=max(magnitudes[longest], _TINY) / max(magnitudes[shortest], _TINY),
        clipped=float(outside[0] / histogram.totals[0]),
        magnitudes=magnitudes,
        sqnr={
            name: {other: _sqnr(found.histogram, ranges[other], symmetric) for other in ranges}
            for name, found in seen.strata.items()
        },
    )


def _sqnr(histogram: Histogram, given: Range, symmetric: bool) -> float:
    """At most 200 dB, which JSON can hold where there is no noise."""
    grid = grid_of(np.array([given.low]), np.array([given.high]), symmetric)
    return float(np.clip(sqnr(histogram, grid)[0], -200, 200))


def _columns(report: DriftReport) -> tuple[str, ...]:
    return (
        "layer",
        "ratio",
        f"range {report.shortest}",
        f"range {report.longest}",
        "clipped",
        f"dB {report.longest}, own range",
        f"dB, {report.shortest}'s range",
    )


def _row(drift: TensorDrift, report: DriftReport) -> tuple[str, ...]:
    own = drift.sqnr[report.longest]
    more = f" and {len(drift.layers) - 1} more" if len(drift.layers) > 1 else ""
    return (
        f"{drift.layers[0]}{more}" if drift.layers else drift.tensor,
        f"{drift.ratio:.2f}",
        f"{drift.magnitudes[report.shortest]:.4g}",
        f"{drift.magnitudes[report.longest]:.4g}",
        f"{drift.clipped:.2%}" if drift.clipped >= 1e-4 or not drift.clipped else f"{drift.clipped:.1e}",
        f"{own[report.longest]:.1f}",
        f"{own[report.shortest]:.1f}",
    )


def table_from_drift(report: DriftReport, rows: int = _SHOWN) -> Table:
    """The tensors that drift most, for the terminal."""
    table = Table(title=report.sentence, title_justify="left")
    for place, heading in enumerate(_columns(report)):
        table.add_column(heading, justify="right" if place else "left")
    for drift in report.tensors[:rows]:
        table.add_row(*_row(drift, report))
    return table


def json_from_drift(report: DriftReport) -> str:
    """All tensors."""
    return json.dumps({**asdict(report), "drifts_from": DRIFTS, "sentence": report.sentence}, allow_nan=False)


def html_from_drift(report: DriftReport, model: str, histogram: str, settings: Mapping[str, str]) -> str:
    """A page with a plot and a table; `histogram` is the coverage's."""
    return html_from_page(
        Page(
            headline=f"{model}: how ranges depend on length",
            subtitle="measured by kiln calibrate",
            remarks=[report.sentence, *histogram.splitlines()],
            figures={"shortest": report.shortest, "longest": report.longest},
            plots=[_plot(report)] if report.tensors else [],
            tables=[PageTable("Tensors", _columns(report), [_row(drift, report) for drift in report.tensors])],
            settings=settings,
        )
    )


def _plot(report: DriftReport) -> Plot:
    def draw(axes: "Axes") -> None:
        axes.plot([drift.ratio for drift in report.tensors], color=SIDE_A, marker=".", markersize=3, linewidth=1)
        axes.axhline(1, color=MUTED, linestyle=":")
        axes.axhline(DRIFTS, color=LIMIT, linestyle="--", linewidth=1)
        axes.set(xlabel="tensors, by ratio", ylabel=f"range {report.longest} / {report.shortest}", yscale="log")

    return drawn("Range on long texts over that on short ones", report.sentence, draw)
