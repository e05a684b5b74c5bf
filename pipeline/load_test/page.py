"""A load report as a self-contained HTML page: distributions of the latencies, and the run over time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipeline.drawing import INK, LIMIT, MUTED, SIDE_A, SIDE_B, Plot, drawn
from pipeline.load_test.report import LATENCIES, LATENCY_COLUMNS, LoadReport, figure_rows, latency_rows, remarks
from pipeline.load_test.run import Outcome, Run
from pipeline.page import Page, PageTable, html_from_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_POINTS = 1000
"""Of one curve: more than a page has pixels."""
_BINS = 60


def html_from_report(report: LoadReport, run: Run) -> str:
    """The page's text."""
    return html_from_page(
        Page(
            headline=f"{report.model} under load",
            subtitle=f"{report.target}, made {report.created} by kiln load",
            remarks=remarks(report),
            figures=dict(figure_rows(report)),
            plots=_plots(report, run),
            tables=[PageTable("Latencies", LATENCY_COLUMNS, latency_rows(report))],
            settings={"workload": report.workload, "loop": report.loop, **report.machine},
        )
    )


def _plots(report: LoadReport, run: Run) -> list[Plot]:
    answered = [outcome for outcome in run.outcomes if outcome.answered]
    if not answered:
        return []
    limits = {"first_token": report.slo.first_token, "time_per_token": report.slo.inter_token}
    curves = [
        _distribution(f"Time to the {title}" if name == "first_token" else title.capitalize(), values, limits.get(name))
        for name, (title, pick) in LATENCIES.items()
        if (values := pick(answered))
    ]
    return [*curves, _arrivals_plot(answered), _rate_plot(run), _running_plot(run)]


def _distribution(title: str, values: Sequence[float], limit: float | None) -> Plot:
    """The share of values at or below each value, on a logarithmic scale."""
    from matplotlib.ticker import LogLocator

    shares = np.linspace(0, 1, min(len(values), _MOST_POINTS))
    places = np.quantile(values, shares) * 1e3
    positive = np.maximum(places, 1e-3)

    def draw(axes: "Axes") -> None:
        axes.plot(positive, shares * 100, color=SIDE_A, linewidth=1.6)
        for percent in (50, 90, 99):
            axes.axhline(percent, color=MUTED, linewidth=0.5, linestyle=":")
        if limit is not None:
            axes.axvline(limit * 1e3, color=LIMIT, linestyle="--", linewidth=1.2)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, place: f"{value:,g}")
        axes.xaxis.set_minor_formatter(lambda value, place: "")
        axes.set(xlabel="milliseconds", ylabel="percent at or below", ylim=(0, 101))

    p50, p99 = np.quantile(values, (0.5, 0.99)) * 1e3
    sentence = f"Half are within {p50:,.1f} ms, 99 % within {p99:,.1f} ms."
    return drawn(title, sentence + (" The dashed line is the limit." if limit else ""), draw)


def _arrivals_plot(answered: Sequence[Outcome]) -> Plot:
    chosen = answered[:: -(-len(answered) // _MOST_POINTS)]

    def draw(axes: "Axes") -> None:
        for lane, color in (("interactive", SIDE_A), ("batch", SIDE_B)):
            of_lane = [outcome for outcome in chosen if outcome.lane == lane]
            if of_lane:
                times = [outcome.first_token * 1e3 for outcome in of_lane]
                axes.scatter([outcome.due for outcome in of_lane], times, s=9, color=color, label=lane, linewidths=0)
        axes.set(xlabel="arrival, s", ylabel="time to the first token, ms", ylim=(0, None))
        if len({outcome.lane for outcome in chosen}) > 1:
            axes.legend(frameon=False, labelcolor=INK)

    return drawn("First token by arrival", "Each dot is a request; a rising cloud is a queue that grows.", draw)


def _rate_plot(run: Run) -> Plot:
    edges = np.linspace(0, max(run.seconds, 1e-6), _BINS + 1)
    times = [moment for outcome in run.outcomes for moment in outcome.deliveries]
    rates = np.histogram(times, edges)[0] / (edges[1] - edges[0])

    def draw(axes: "Axes") -> None:
        axes.stairs(rates, edges, color=SIDE_A, fill=True)
        axes.set(xlabel="s", ylabel="deliveries/s")

    return drawn("Output over time", "Deliveries of new tokens, usually one token each, to all requests.", draw)


def _running_plot(run: Run) -> Plot:
    starts = [(outcome.sent, 1) for outcome in run.outcomes]
    ends = [(run.seconds if outcome.end is None else outcome.end, -1) for outcome in run.outcomes]
    events = sorted([*starts, *ends])
    counts = np.cumsum([change for _, change in events])

    def draw(axes: "Axes") -> None:
        axes.step([moment for moment, _ in events], counts, where="post", color=SIDE_A, linewidth=1.2)
        axes.set(xlabel="s", ylabel="requests", ylim=(0, None))

    return drawn("Requests outstanding", f"Sent and not yet ended: at most {counts.max()}.", draw)
