"""A benchmark's report as the terminal shows it. Measures nothing."""

from rich.console import Group, RenderableType
from rich.table import Table

from pipeline.bench import BenchReport

_SHOWN = {"bytes": ("MiB", 1 / 2**20), "s": ("ms", 1e3)}
"""Unit to the one that the table shows, and the factor between them."""


def table_from_report(report: BenchReport) -> RenderableType:
    """The report as the terminal shows it."""
    title = f"{report.name} on {report.machine['cpu']}, {report.threads} threads, {report.repetitions} repetitions"
    table = Table(title=title, title_justify="left")
    for heading in ("figure", "unit", "median", "lowest", "highest", "floor", "of floor", "bound by"):
        table.add_column(heading, justify="left" if heading in ("figure", "unit", "bound by") else "right")
    for figure in report.figures:
        unit, scale = _SHOWN.get(figure.unit, (figure.unit, 1.0))
        values = (figure.median, figure.lowest, figure.highest, figure.floor)
        shown = ["unknown" if value is None else f"{value * scale:,.1f}" for value in values]
        ratio = "" if figure.ratio is None else f"{figure.ratio:.0%}"
        table.add_row(figure.title, unit, *shown, ratio, figure.bound_by)
    limits = (
        f"Limits measured in this run: reading {report.limits.read_bandwidth / 1e9:.1f} GB/s, "
        f"matrix products {report.limits.product_rate / 1e9:.0f} Gop/s ({report.limits.product_shape})."
    )
    return Group(table, *_memory_tables(report), limits)


def _memory_tables(report: BenchReport) -> list[RenderableType]:
    """What the engine's own account says of each phase, and what the process took at most."""
    account = {phase.name: phase for phase in report.memory.phases} if report.memory is not None else {}
    columns = ("activations", "workspace", "cache", "peak")
    table = Table(title="Memory, MiB", title_justify="left")
    for heading in ("phase", *columns[:-1], "weights and these", "process at most"):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    for name in dict.fromkeys((*account, *report.peaks)):
        own = [f"{getattr(account[name], column) / 2**20:,.1f}" if name in account else "" for column in columns]
        table.add_row(name, *own, f"{report.peaks[name] / 2**20:,.1f}" if name in report.peaks else "")
    return [table] if report.memory is None else [table, f"Account: {report.memory.sentence()}."]
