"""The gate's report as one HTML page that needs nothing else: no script, no font, no network."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.compare.report import number
from pipeline.drawing import INK, SIDE_A, SIDE_B, Plot, drawn
from pipeline.gate.report import GateReport, StratumReport, advice_in_words, reordered_in_words
from pipeline.page import html_from_template, write_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LAYERS = 20
"""That the page lists."""


def html_from_report(report: GateReport) -> str:
    """The page's text. Everything that comes from models or users is escaped."""
    layers = [(stratum.name, row) for stratum in report.strata for row in stratum.layers]
    return html_from_template(
        "pipeline.gate",
        "data/gate.html.jinja",
        {"number": number, "reordered": reordered_in_words},
        report=report,
        sides=(("A", "reference", report.reference), ("B", "candidate", report.candidate)),
        noise={(stratum.name, name): value for stratum in report.strata for name, value in stratum.noise.items()},
        plots=_plots(report),
        layers=sorted(layers, key=lambda item: -item[1].added)[:_LAYERS],
        advice="" if report.passed else advice_in_words(report.advice),
    )


def write_html(report: GateReport, path: Path) -> None:
    """Write the page. Raises KilnError where it cannot be written."""
    write_page(html_from_report(report), path)


def _plots(report: GateReport) -> list[Plot]:
    plots = [plot for stratum in report.strata if stratum.curve for plot in _text_plots(stratum)]
    return plots + [_layer_plot(stratum) for stratum in report.strata if stratum.layers]


def _text_plots(stratum: StratumReport) -> list[Plot]:
    positions = [part.start for part in stratum.curve]

    def kl(axes: "Axes") -> None:
        axes.plot(positions, _positive([part.kl_mean for part in stratum.curve]), color=SIDE_A, linewidth=1.4)
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(lambda value, place: "")
        axes.set(xlabel="position in the context", ylabel="mean KL, nats")

    def perplexity(axes: "Axes") -> None:
        for color, label, values in (
            (SIDE_A, "reference", [part.perplexity_reference for part in stratum.curve]),
            (SIDE_B, "candidate", [part.perplexity_candidate for part in stratum.curve]),
        ):
            axes.plot(positions, values, color=color, linewidth=1.2, label=label)
        axes.set(xlabel="position in the context", ylabel="perplexity")
        axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 0.98), labelcolor=INK)

    worst = max(stratum.curve, key=lambda part: part.kl_mean)
    ratio = stratum.facts["perplexity, candidate"] / stratum.facts["perplexity, reference"] - 1
    return [
        drawn(
            f"KL divergence by position, {stratum.name}",
            f"The highest point, from position {worst.start}, is {number(worst.kl_mean)} nats.",
            kl,
        ),
        drawn(
            f"Perplexity by position, {stratum.name}", f"Over the whole the candidate's is {ratio:+.2%}.", perplexity
        ),
    ]


def _layer_plot(stratum: StratumReport) -> Plot:
    rows = stratum.layers

    def draw(axes: "Axes") -> None:
        values = [row.snr_db if math.isfinite(row.snr_db) else math.nan for row in rows]
        axes.plot(range(len(rows)), values, color=SIDE_A, linewidth=0, marker=".", markersize=4)
        axes.set(xlabel="layer, in the order of the graph", ylabel="SNR, dB")

    worst = min(rows, key=lambda row: row.snr_db)
    return drawn(
        f"SNR by layer, {stratum.name}",
        f"The lowest is {number(worst.snr_db)} dB at {worst.name}; layers without any error are left out.",
        draw,
    )


def _positive(values: Sequence[float]) -> list[float]:
    """What a logarithmic axis can show; zeros leave a gap."""
    return [value if value > 0 else math.nan for value in values]
