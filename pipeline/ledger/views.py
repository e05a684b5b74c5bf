"""What the ledger shows: lists, one entry, two entries against each other, one figure over time."""

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.drawing import INK, LIMIT, SIDE_A, SIDE_B, drawn
from pipeline.forecast import size
from pipeline.ledger.entry import LIMIT_PREFIX, OBJECTS, TEXTS, Entry, FigureValues, changes
from pipeline.ledger.judging import Judgement, judge
from pipeline.ledger.store import Ledger
from pipeline.page import Page, PageTable, html_from_page
from plugins.errors import KilnError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR = 30
"""Characters of the longest bar."""


def number(value: float) -> str:
    """Four digits."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def quantity(value: float, unit: str) -> str:
    """A number and its unit; bytes in binary units."""
    return size(value) if unit == "bytes" else f"{number(value)} {unit}".strip()


def table_of_entries(ledger: Ledger, entries: Sequence[Entry]) -> RenderableType:
    """One line each, newest first; a figure with a question mark is suspected only."""
    table = Table()
    for heading in ("entry", "kind", "when", "model", "subject", "since", "what changed", "worse"):
        table.add_column(heading, overflow="fold")
    for entry in entries:
        since = "" if entry.parent is None else str(entry.parent)
        when = entry.created.removesuffix("Z").removesuffix("+00:00").replace("T", " ")
        table.add_row(
            str(entry.number),
            entry.kind,
            when,
            entry.name,
            entry.subject[:12],
            since,
            Text(entry.change),
            Text(", ".join(flags(ledger, entry)), "red"),
        )
    return table


def table_of_entry(entry: Entry) -> RenderableType:
    """Everything but the document."""
    head = Table(title=f"Entry {entry.number}: {entry.kind} of {entry.name}", title_justify="left", show_header=False)
    head.add_column(style="bold")
    head.add_column(overflow="fold")
    rows = {"when": entry.created, "path": entry.path, "subject": entry.subject, **entry.facts}
    if entry.parent is not None:
        rows = {**rows, f"since entry {entry.parent}": entry.change}
    for name, text in {**rows, **{f"sha256 of {name}": text for name, text in entry.digests.items()}}.items():
        head.add_row(name, Text(text))
    figures = Table(title="Figures", title_justify="left")
    for heading in ("figure", "unit", "median", "lowest", "highest", "repetitions"):
        figures.add_column(heading, justify="left" if heading in ("figure", "unit") else "right")
    for figure in entry.figures:
        values = (statistics.median(figure.values), min(figure.values), max(figure.values))
        figures.add_row(figure.name, figure.unit, *map(number, values), str(len(figure.values)))
    return Group(head, figures)


def runs_like(ledger: Ledger, entry: Entry) -> dict[str, list[tuple[float, ...]]]:
    """Values by figure of every run with the same facts: `entry` repeated, also on a bundle that was built again."""
    runs: dict[str, list[tuple[float, ...]]] = {}
    for one in ledger.entries(kind=entry.kind, name=entry.name, facts=entry.facts):
        for figure in one.figures:
            runs.setdefault(figure.name, []).append(figure.values)
    return runs


def flags(ledger: Ledger, entry: Entry) -> list[str]:
    """Figures of a benchmark that are worse than before the last change, and, with a "?", those that may be."""
    if entry.kind != "benchmark":
        return []
    before: Entry | None = entry
    while before is not None and before.facts == entry.facts:  # repetitions of the same
        before = None if before.parent is None else ledger.entry(before.parent)
    found = {} if before is None else judged(ledger, before, entry)
    return [
        name if judgement.regressed else f"{name}?"
        for name, (_, judgement) in found.items()
        if judgement.verdict in ("worse", "suspected worse") and not name.startswith(LIMIT_PREFIX)
    ]


def regressions(figures: Mapping[str, tuple[FigureValues, Judgement]]) -> list[str]:
    """Names of what is worse of the bundle's own; the machine's limits are not its doing."""
    return [name for name, (_, one) in figures.items() if one.regressed and not name.startswith(LIMIT_PREFIX)]


def judged(ledger: Ledger, a: Entry, b: Entry) -> dict[str, tuple[FigureValues, Judgement]]:
    """Figures that both have, over all runs like each."""
    before, after = runs_like(ledger, a), runs_like(ledger, b)
    return {
        figure.name: (figure, judge(before[figure.name], after[figure.name], figure.higher_is_better))
        for figure in b.figures
        if a.figure(figure.name) is not None
    }


def require_comparable(a: Entry, b: Entry) -> None:
    """Raise KilnError for entries of two kinds, which share no figures."""
    if a.kind != b.kind:
        raise KilnError(
            f"entry {a.number} is a {a.kind} and entry {b.number} a {b.kind}; give two of one "
            "kind, as kiln ledger list shows them"
        )


def table_of_difference(a: Entry, b: Entry, figures: dict[str, tuple[FigureValues, Judgement]]) -> RenderableType:
    """What differs between two entries: facts, then figures with a verdict."""
    facts = Table(title=f"From entry {a.number} to entry {b.number}", title_justify="left", show_header=False)
    facts.add_column(overflow="fold")
    for change in changes(a.facts, b.facts) or ["no fact differs"]:
        facts.add_row(Text(change))
    table = Table(title="Figures: medians over runs", title_justify="left")
    for heading in ("figure", "unit", str(a.number), str(b.number), "verdict"):
        table.add_column(heading, justify="left" if heading in ("figure", "unit", "verdict") else "right")
    for name, (figure, judgement) in figures.items():
        style = {"worse": "bold red", "better": "green"}.get(judgement.verdict, "")
        values = (number(judgement.before), number(judgement.after))
        table.add_row(name, figure.unit, *values, Text(judgement.sentence(), style))
    flagged = regressions(figures)
    verdict = Text(f"REGRESSED: {', '.join(flagged)}", "bold red") if flagged else Text("No regression.", "green")
    slower = [name for name, (_, one) in figures.items() if name.startswith(LIMIT_PREFIX) and one.regressed]
    machine = [Text(f"The machine itself was slower ({', '.join(slower)}): measure again", "yellow")] if slower else []
    return Group(facts, table, verdict, *machine)


def difference_document(a: Entry, b: Entry, figures: dict[str, tuple[FigureValues, Judgement]]) -> dict[str, Any]:
    """The same for JSON."""
    return {
        "a": a.number,
        "b": b.number,
        "changes": changes(a.facts, b.facts),
        "regressed": regressions(figures),
        "figures": {
            name: {
                "unit": figure.unit,
                "before": judgement.before,
                "after": judgement.after,
                "change": judgement.change,
                "p": judgement.p,
                "runs": judgement.runs,
                "verdict": judgement.verdict,
            }
            for name, (figure, judgement) in figures.items()
        },
    }


def entry_document(entry: Entry) -> dict[str, Any]:
    """An entry for JSON, with its whole document."""
    return {
        "entry": entry.number,
        **{name: getattr(entry, name) for name in TEXTS},
        "machine": entry.machine,
        "figures": {
            figure.name: {"unit": figure.unit, "values": figure.values, "higher_is_better": figure.higher_is_better}
            for figure in entry.figures
        },
        **{name: dict(getattr(entry, name)) for name in OBJECTS},
    }


def entries_with(ledger: Ledger, metric: str, name: str | None) -> list[Entry]:
    """Those that have a figure, oldest first. Raises KilnError naming the figures that there are."""
    entries = ledger.entries(name=name)
    found = [entry for entry in reversed(entries) if entry.figure(metric) is not None]
    if not found:
        known = sorted({figure.name for entry in entries for figure in entry.figures})
        raise KilnError(f"no entry has a figure '{metric}'; known are {', '.join(known) or 'none'}")
    return found


def bars_of_metric(entries: Sequence[Entry], metric: str) -> RenderableType:
    """A figure over time, for the terminal."""
    rows = [(entry, figure) for entry in entries if (figure := entry.figure(metric)) is not None]
    most = max(abs(statistics.median(figure.values)) for _, figure in rows) or 1.0
    table = Table(title=f"{metric}, {rows[0][1].unit}", title_justify="left")
    for heading in ("entry", "model", "subject", "median", "", "what changed"):
        table.add_column(heading, justify="right" if heading == "median" else "left")
    for entry, figure in rows:
        median = statistics.median(figure.values)
        bar = "█" * max(round(_BAR * abs(median) / most), 1)
        table.add_row(str(entry.number), entry.name, entry.subject[:12], number(median), bar, Text(entry.change))
    return table


def page_of_metric(entries: Sequence[Entry], metric: str, ledger: Ledger) -> str:
    """The same as a page with a plot."""
    rows = [(entry, figure) for entry in entries if (figure := entry.figure(metric)) is not None]
    unit = rows[0][1].unit
    best = "higher is better" if rows[0][1].higher_is_better else "lower is better"

    def draw(axes: "Axes") -> None:
        for name, colour in zip(dict.fromkeys(entry.name for entry, _ in rows), _endless(), strict=False):
            mine = [(place, figure.values) for place, (entry, figure) in enumerate(rows) if entry.name == name]
            places, medians = [place for place, _ in mine], [statistics.median(values) for _, values in mine]
            low = [median - min(values) for median, (_, values) in zip(medians, mine, strict=True)]
            high = [max(values) - median for median, (_, values) in zip(medians, mine, strict=True)]
            axes.errorbar(places, medians, (low, high), color=colour, marker="o", markersize=4, capsize=2, label=name)
        axes.set_xticks(range(len(rows)), [str(entry.number) for entry, _ in rows])
        axes.set(xlabel="entry", ylabel=unit, ylim=(0, None))
        axes.legend(frameon=False, labelcolor=INK)

    table = [
        (str(entry.number), entry.created, entry.name, number(statistics.median(figure.values)), entry.change)
        for entry, figure in rows
    ]
    return html_from_page(
        Page(
            headline=f"{metric} over time",
            subtitle=f"{ledger.path}, {len(rows)} entries",
            remarks=(),
            figures={"figure": metric, "unit": f"{unit}, {best}"},
            plots=[drawn(metric, "Medians; bars reach from the lowest to the highest repetition.", draw)],
            tables=[PageTable("Entries", ("entry", "when", "model", unit or "value", "what changed"), table)],
            settings={"machines": ", ".join(dict.fromkeys(entry.machine for entry, _ in rows))},
        )
    )


def _endless() -> Sequence[str]:
    return (SIDE_A, SIDE_B, LIMIT) * 100
