"""What an ablation found: one table, for the terminal, as JSON and as a page."""

import json
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.ablate.ablation import Ablation, Outcome
from pipeline.drawing import INK, SIDE_A, Plot, drawn
from pipeline.page import Page, PageTable, html_from_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = (
    "on",
    "rate, 1/s",
    "lowest to highest",
    "of baseline",
    "of the one before",
    "latency, ms",
    "peak, MiB",
    "accuracy",
)

NOTE = (
    "First each switch alone, then cumulatively in the recommended order. Rates are medians of repetitions; where "
    "their ranges overlap, nothing is shown. Accuracy is against the reference: the mean KL divergence of a decoder, "
    "the largest |a - b| of other outputs."
)


def rows_from_ablation(ablation: Ablation) -> list[tuple[str, ...]]:
    """A row of `COLUMNS` for each variant."""
    return [_row(ablation, outcome) for outcome in ablation.outcomes]


def _row(ablation: Ablation, outcome: Outcome) -> tuple[str, ...]:
    variant, title = outcome.variant, outcome.variant.title(ablation.switches)
    if outcome.measured is None:
        return (title, *("-" for _ in COLUMNS[1:-1]), outcome.failure)
    baseline = ablation.outcomes[0].measured
    before = ablation.outcomes[variant.parent].measured if variant.parent is not None else None
    error = outcome.error
    return (
        title,
        f"{outcome.measured.rate:,.2f}",
        f"{min(outcome.measured.rates):,.2f} to {max(outcome.measured.rates):,.2f}",
        f"{outcome.measured.rate / baseline.rate:.2f}x" if baseline is not None else "-",
        f"{outcome.measured.rate / before.rate:.2f}x" if before is not None else "-",
        f"{outcome.measured.latency * 1e3:,.1f}",
        "-" if outcome.measured.peak is None else f"{outcome.measured.peak / 2**20:,.0f}",
        "the reference" if error is None else f"{error[0]} {error[1]:.2e}",
    )


def _workload(ablation: Ablation) -> str:
    config = ablation.config
    if "kv" in ablation.switches:
        return f"{config.requests} requests of {config.prompt} tokens that give {config.output} each"
    return f"{config.requests} samples"


def table_from_ablation(ablation: Ablation) -> RenderableType:
    """As the terminal shows it; a line parts single switches from the recommended order."""
    table = Table(title=f"{ablation.model}: {_workload(ablation)}", title_justify="left")
    for place, heading in enumerate(COLUMNS):
        table.add_column(heading, justify="left" if place in (0, len(COLUMNS) - 1) else "right", overflow="fold")
    for place, row in enumerate(rows_from_ablation(ablation)):
        table.add_row(*map(Text, row), end_section=place in (0, len(ablation.switches)))
    return Group(table, NOTE)


def json_from_ablation(ablation: Ablation) -> str:
    """One line."""
    return json.dumps(
        {
            "model": ablation.model,
            "switches": ablation.switches,
            "workload": _workload(ablation),
            "variants": [_document(ablation, outcome) for outcome in ablation.outcomes],
        }
    )


def _document(ablation: Ablation, outcome: Outcome) -> dict[str, Any]:
    measured = outcome.measured
    return {
        "on": [switch for switch in ablation.switches if switch in outcome.variant.on],
        "parent": outcome.variant.parent,
        "failure": outcome.failure or None,
        "rates": None if measured is None else measured.rates,
        "latencies": None if measured is None else measured.latencies,
        "peak_memory": None if measured is None else measured.peak,
        "accuracy": outcome.error,
    }


def html_from_ablation(ablation: Ablation) -> str:
    """The page's text."""
    return html_from_page(
        Page(
            headline=f"{ablation.model}: what each switch gives",
            subtitle=f"{_workload(ablation)}; by kiln ablate",
            remarks=[
                f"{one.variant.title(ablation.switches)}: {one.failure}" for one in ablation.outcomes if one.failure
            ],
            figures={"order": ", then ".join(ablation.switches)},
            plots=[_plot(ablation)],
            tables=[PageTable("Variants", COLUMNS, rows_from_ablation(ablation))],
            settings={"workload": _workload(ablation), "repetitions": str(ablation.config.repetitions)},
        )
    )


def _plot(ablation: Ablation) -> Plot:
    shown = [outcome for outcome in ablation.outcomes if outcome.measured is not None]

    def draw(axes: "Axes") -> None:
        rates = [outcome.measured.rate for outcome in shown if outcome.measured is not None]
        bars = axes.barh(range(len(shown)), rates, color=SIDE_A, height=0.6)
        axes.bar_label(bars, [f"{rate:,.1f}" for rate in rates], padding=3, color=INK)
        axes.set_yticks(range(len(shown)), [outcome.variant.title(ablation.switches) for outcome in shown])
        axes.invert_yaxis()
        axes.set(xlabel="tokens/s" if "kv" in ablation.switches else "samples/s")
        axes.margins(x=0.2)

    return drawn("Rate by what is on", NOTE, draw)
