"""What a search found, for the terminal, as JSON and as a self-contained HTML page."""

import json
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table

from engines.bundle import EngineBundle
from pipeline.drawing import INK, MUTED, SIDE_A, SIDE_B, Plot, drawn
from pipeline.page import Page, PageTable, html_from_page
from pipeline.tune.search import Point
from pipeline.tune.tuning import Tuning

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMULA = "QPS(b) / (b x QPS(1)), QPS(1) = 1 / latency of a single request"


def sentences(tuning: Tuning) -> list[str]:
    """The outcome, and what a reader must know before believing it."""
    last = tuning.batch_points[-1].setting.batch
    where = (
        f"Efficiency falls beyond batch {tuning.knee}."
        if tuning.falls
        else f"Efficiency does not fall up to batch {last}, the largest measured."
    )
    limits = "".join(f", {name.replace('_', ' ')} at most {value:g} s" for name, value in tuning.config.limits.items())
    return [where, f"Best for {tuning.config.objective}{limits}: {tuning.chosen.setting}.", *tuning.remarks]


def json_from_tuning(tuning: Tuning, written: EngineBundle | None) -> str:
    """One line."""
    document = {
        "bundle": str(tuning.bundle.path),
        "sha256": tuning.bundle.sha256,
        "seconds": tuning.seconds,
        "efficiency_is": FORMULA,
        "block_size": tuning.chosen.setting.block_size,
        **tuning.serving_record().model_dump(),
        "remarks": list(tuning.remarks),
        "written": None if written is None else {"path": str(written.path), "sha256": written.sha256},
    }
    return json.dumps(document, allow_nan=False)


def _columns(tuning: Tuning) -> tuple[str, ...]:
    is_decoder = tuning.bundle.manifest.decoder is not None
    settings, more = (("step", "block"), ("first token", "inter-token")) if is_decoder else ((), ())
    goodput = ("goodput",) if tuning.config.limits else ()
    return ("batch", *settings, "QPS", "noise", "latency", "efficiency", *more, *goodput)


def _row(tuning: Tuning, point: Point) -> tuple[str, ...]:
    def text(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g}"

    setting, is_decoder = point.setting, tuning.bundle.manifest.decoder is not None
    more = (point.median_of("first_token"), point.median_of("inter_token"))
    return (
        f"{'* ' if point is tuning.chosen else ''}{setting.batch}",
        *((str(setting.tokens_per_step), str(setting.block_size)) if is_decoder else ()),
        text(point.rate),
        f"{point.noise:.0%}" if len(point.samples) > 1 else "once",
        text(point.latency),
        f"{tuning.efficiency(point):.2f}",
        *(map(text, more) if is_decoder else ()),
        *((text(point.median_of("goodput")),) if tuning.config.limits else ()),
    )


def table_from_tuning(tuning: Tuning) -> RenderableType:
    """The measurements, and what follows from them."""
    table = Table(title=f"{tuning.bundle.manifest.name}: {tuning.workload}", title_justify="left")
    for place, heading in enumerate(_columns(tuning)):
        table.add_column(heading, justify="right" if place else "left")
    for point in tuning.points:
        table.add_row(*_row(tuning, point))
    return Group(table, f"* chosen. Times are seconds, P99 for tokens. Efficiency is {FORMULA}.", *sentences(tuning))


def html_from_tuning(tuning: Tuning) -> str:
    """The page's text."""
    record = tuning.serving_record()
    return html_from_page(
        Page(
            headline=f"{tuning.bundle.manifest.name}: how it is served best",
            subtitle=f"{tuning.bundle.path}, measured in {tuning.seconds:.0f} s by kiln tune",
            remarks=tuning.remarks,
            figures={
                "chosen": record.sentence(),
                "block size": str(tuning.chosen.setting.block_size or "none"),
                "knee": sentences(tuning)[0],
                "efficiency": FORMULA,
            },
            plots=[_efficiency_plot(tuning), _rate_plot(tuning), _latency_plot(tuning)],
            tables=[PageTable("Measurements", _columns(tuning), [_row(tuning, point) for point in tuning.points])],
            settings={
                "workload": tuning.workload,
                "bundle": tuning.bundle.sha256,
                "threads": str(tuning.threads),
                "repetitions": str(tuning.config.repetitions),
                **record.machine,
            },
        )
    )


def _efficiency_plot(tuning: Tuning) -> Plot:
    batches = [point.setting.batch for point in tuning.batch_points]

    def draw(axes: "Axes") -> None:
        axes.plot(batches, [1 / batch for batch in batches], color=MUTED, linestyle=":", label="no gain (1/b)")
        values = [tuning.efficiency(point) for point in tuning.batch_points]
        spread = [value * point.noise for value, point in zip(values, tuning.batch_points, strict=True)]
        axes.errorbar(batches, values, spread, color=SIDE_A, marker="o", markersize=4, capsize=2, label="measured")
        axes.axvline(tuning.knee, color=SIDE_B, linestyle="--", linewidth=1.2, label="knee")
        _batch_axis(axes, batches)
        axes.set(ylabel="efficiency", ylim=(0, None))
        axes.legend(frameon=False, labelcolor=INK)

    return drawn("Efficiency by batch size", sentences(tuning)[0], draw)


def _rate_plot(tuning: Tuning) -> Plot:
    batches = [point.setting.batch for point in tuning.batch_points]

    def draw(axes: "Axes") -> None:
        rates = [point.rate for point in tuning.batch_points]
        spread = [point.rate * point.noise for point in tuning.batch_points]
        axes.errorbar(batches, rates, spread, color=SIDE_A, marker="o", markersize=4, capsize=2, label="all")
        if tuning.config.limits:
            goodput = [point.value("goodput") for point in tuning.batch_points]
            axes.plot(batches, goodput, color=SIDE_B, marker="o", markersize=4, label="within the limits")
            axes.legend(frameon=False, labelcolor=INK)
        axes.axvline(tuning.chosen.setting.batch, color=SIDE_B, linestyle="--", linewidth=1.2)
        _batch_axis(axes, batches)
        axes.set(ylabel="requests/s", ylim=(0, None))

    return drawn("Throughput by batch size", "The dashed line is the batch size that was chosen.", draw)


def _latency_plot(tuning: Tuning) -> Plot:
    batches = [point.setting.batch for point in tuning.batch_points]

    def draw(axes: "Axes") -> None:
        latencies = [point.latency for point in tuning.batch_points]
        axes.plot(batches, latencies, color=SIDE_A, marker="o", markersize=4)
        _batch_axis(axes, batches)
        axes.set(ylabel="latency, s", ylim=(0, None))

    return drawn("Latency by batch size", "Mean seconds from sending a request to its end.", draw)


def _batch_axis(axes: "Axes", batches: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set(xlabel="batch size")
