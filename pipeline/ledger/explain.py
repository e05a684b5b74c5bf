"""`kiln explain`: step by step, what each optimisation gave in latency, memory and accuracy.

Steps are the builds from the oldest ancestor in the ledger to the bundle, each with its benchmarks and comparisons;
passes are the bundle's own. What was not measured is left open.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from engines.bundle import EngineBundle
from engines.manifest import Manifest, PassRecord
from pipeline.ledger.entry import Entry, Kind
from pipeline.ledger.store import Ledger
from pipeline.ledger.views import quantity

_ORDER = (
    "first_token",
    "prefill_",
    "decode_batch_",
    "latency_batch_",
    "throughput_batch_",
    "ablation/rate",
    "ablation/latency",
)
_MEMORY = ("peak_memory", "ablation/peak_memory", "bundle_bytes")
_ACCURACY = ("compare/", "check/")
_MOST_STEPS = 50


@dataclass(frozen=True)
class Step:
    """One build and what was measured of it: medians over all runs, by figure."""

    entry: Entry
    figures: Mapping[str, float]
    units: Mapping[str, str]

    def chosen(self, prefixes: Sequence[str]) -> list[str]:
        """Names of the figures of a kind."""
        return [name for name in self.figures if name.startswith(tuple(prefixes))]


@dataclass(frozen=True)
class Explanation:
    """The steps, oldest first, and the bundle's own manifest."""

    steps: tuple[Step, ...]
    ablation: tuple[Step, ...]
    """The variants of an ablation that led to this bundle, each with its own figures."""
    manifest: Manifest


def explain(bundle: EngineBundle, ledger: Ledger | None) -> Explanation:
    """What the ledger knows of how a bundle came about; without one, of its own passes only."""
    if ledger is None:
        return Explanation((), (), bundle.manifest)
    return Explanation(
        _chain(ledger, bundle, "build", lambda entries: _built(ledger, entries)),
        _chain(ledger, bundle, "ablation", lambda entries: entries),
        bundle.manifest,
    )


def _chain(
    ledger: Ledger, bundle: EngineBundle, kind: Kind, measured: Callable[[Sequence[Entry]], Sequence[Entry]]
) -> tuple[Step, ...]:
    """The newest entry of the bundle and its ancestors, oldest first; what was done again is one step.

    `measured` gives the entries that have such a step's figures.
    """
    found = ledger.entries(kind=kind, subject=bundle.sha256, limit=1)
    entry = found[0] if found else None
    steps: list[Step] = []
    while entry is not None and len(steps) < _MOST_STEPS:
        same = [entry]
        while (entry := _parent(ledger, same[-1])) is not None and entry.facts == same[0].facts:
            same.append(entry)
        steps.append(_step(measured(same), replace(same[0], change=same[-1].change)))
    return tuple(reversed(steps))


def _parent(ledger: Ledger, entry: Entry) -> Entry | None:
    return None if entry.parent is None else ledger.entry(entry.parent)


def _built(ledger: Ledger, builds: Sequence[Entry]) -> list[Entry]:
    """Builds with the benchmarks and comparisons of their bundles."""
    subjects = dict.fromkeys(build.subject for build in builds)
    return [one for subject in subjects for one in ledger.entries(subject=subject) if one.kind != "ablation"]


def _step(entries: Sequence[Entry], entry: Entry) -> Step:
    values: dict[str, list[float]] = {}
    units: dict[str, str] = {}
    for figure in (figure for one in entries for figure in one.figures):
        values.setdefault(figure.name, []).append(statistics.median(figure.values))
        units[figure.name] = figure.unit
    return Step(entry, {name: statistics.median(found) for name, found in values.items()}, units)


def tables_from_explanation(explanation: Explanation) -> RenderableType:
    """As the terminal shows it."""
    parts: list[RenderableType] = []
    if explanation.steps:
        parts.append(_steps_table("Builds, each against the one before", explanation.steps))
    else:
        parts.append(Text("The ledger knows no build of this bundle; its own passes are all that can be told.", "dim"))
    if explanation.ablation:
        parts.append(_steps_table("Ablation, each against the one before", explanation.ablation))
    parts.append(_passes_table(explanation.manifest.passes))
    for check in explanation.manifest.checks:
        parts.append(Text(f"{check.name}: {check.sentence()}"))
    if explanation.manifest.quantization is not None:
        parts.append(Text(f"quantised: {explanation.manifest.quantization.sentence()}"))
    return Group(*parts)


def _steps_table(title: str, steps: Sequence[Step]) -> Table:
    groups = {"latency and rate": _ORDER, "memory": _MEMORY, "accuracy": _ACCURACY}
    table = Table(title=title, title_justify="left", show_lines=True)
    for heading in ("entry", "what changed", *groups):
        table.add_column(heading, overflow="fold")
    before: Step | None = None
    for step in steps:
        change = step.entry.change if before is not None else "the first"
        cells = [_figures_text(step, before, prefixes) for prefixes in groups.values()]
        table.add_row(str(step.entry.number), Text(change), *cells)
        before = step
    return table


def _figures_text(step: Step, before: Step | None, prefixes: Sequence[str]) -> str:
    """One figure a line, with how it changed."""
    lines = []
    for name in step.chosen(prefixes):
        value, unit = step.figures[name], step.units[name]
        line = f"{name} {quantity(value, unit)}"
        old = before.figures.get(name) if before is not None else None
        if old:
            line += f" ({value / old - 1:+.0%})"
        lines.append(line)
    return "\n".join(lines) or "not measured"


def _passes_table(passes: Sequence[PassRecord]) -> Table:
    table = Table(title="Passes of this bundle, in order", title_justify="left")
    for heading in ("pass", "what it did", "nodes", "one run", "relative error"):
        table.add_column(heading, justify="left" if heading in ("pass", "what it did") else "right")
    for record in passes:
        if not record.changed and record.rolled_back is None:
            continue
        did = f"rolled back: {record.rolled_back}" if record.rolled_back else f"{record.rewrites} rewrites"
        nodes = f"{sum(record.nodes_before.values())} -> {sum(record.nodes_after.values())}"
        error = "" if record.relative_error is None else f"{record.relative_error:.1e}"
        table.add_row(record.name, did, nodes, _time_text(record), error)
    return table


def _time_text(record: PassRecord) -> str:
    if record.seconds_before is None or record.seconds_after is None:
        return "not measured"
    change = record.seconds_after / record.seconds_before - 1 if record.seconds_before else 0.0
    return f"{record.seconds_before * 1e3:.2f} -> {record.seconds_after * 1e3:.2f} ms ({change:+.0%})"


def document_from_explanation(explanation: Explanation) -> dict[str, Any]:
    """The same for JSON."""
    return {
        "builds": [_step_document(step) for step in explanation.steps],
        "ablation": [_step_document(step) for step in explanation.ablation],
        "passes": [record.model_dump(mode="json") for record in explanation.manifest.passes],
        "checks": [check.model_dump(mode="json") for check in explanation.manifest.checks],
    }


def _step_document(step: Step) -> dict[str, Any]:
    return {
        "entry": step.entry.number,
        "change": step.entry.change,
        "subject": step.entry.subject,
        "figures": {name: {"value": value, "unit": step.units[name]} for name, value in step.figures.items()},
    }
