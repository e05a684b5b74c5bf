"""The result of a comparison: frozen data, as JSON and as terminal tables.

Knows nothing of how values were measured; `pipeline.compare.html` draws the same data.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.compare.tolerance import Limit, ModelKind

Direction = Literal["at most", "at least"]


@dataclass(frozen=True)
class Side:
    """One of the two that were compared; `versions` are those of the libraries that ran it.

    `precision` of the weights and `cache` of the KV cache are fp32, fp16, bf16 or int8; `cache` is None where the model
    has none of its own choosing.
    """

    kind: Literal["torch", "onnx", "bundle"]
    name: str
    path: str
    sha256: str
    precision: str
    versions: Mapping[str, str]
    cache: str | None = None

    @property
    def precisions(self) -> tuple[str, ...]:
        """What decides its tolerances."""
        return (self.precision,) if self.cache is None else (self.precision, self.cache)

    @property
    def description(self) -> str:
        """Kind and precisions in words."""
        return f"{self.kind}, {self.precision}" + (f", {self.cache} cache" if self.cache else "")


@dataclass(frozen=True)
class Check:
    """One value held against one limit. `passed` is stored: an output's rule looks at every element."""

    name: str
    title: str
    value: float
    direction: Direction
    limit: float
    origin: str
    passed: bool
    note: str = ""


def check_from_limit(name: str, title: str, value: float, direction: Direction, limit: Limit, note: str = "") -> Check:
    """Hold a value against its limit; NaN never passes."""
    passed = value <= limit.value if direction == "at most" else value >= limit.value
    return Check(name, title, float(value), direction, limit.value, limit.origin, bool(passed), note)


@dataclass(frozen=True)
class OutputRow:
    """Error of one output over all samples; `median_abs` is the largest of the samples' medians."""

    name: str
    shape: str
    max_abs: float
    mean_abs: float
    median_abs: float
    max_rel: float
    elements: int
    passed: bool
    note: str = ""


@dataclass(frozen=True)
class Curves:
    """Per-token values of a text, binned by position; the histogram's edges are log10 of KL in nats."""

    positions: tuple[int, ...]
    error_max: tuple[float, ...]
    kl_mean: tuple[float, ...]
    kl_edges: tuple[float, ...]
    kl_counts: tuple[int, ...]
    window_starts: tuple[int, ...]
    window_perplexity_a: tuple[float, ...]
    window_perplexity_b: tuple[float, ...]


@dataclass(frozen=True)
class PromptRow:
    """Greedy generation after one prompt: how many of `tokens` agree before the first difference."""

    title: str
    prompt_tokens: int
    tokens: int
    agreed: int
    note: str = ""


@dataclass(frozen=True)
class ComparisonReport:
    """Everything that one comparison found."""

    created: str
    model_kind: ModelKind
    a: Side
    b: Side
    machine: Mapping[str, str]
    settings: Mapping[str, str]
    checks: tuple[Check, ...]
    outputs: tuple[OutputRow, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    curves: Curves | None = None
    prompts: tuple[PromptRow, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every check is within its limit; a report without checks has not passed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def to_json(self) -> str:
        """One JSON document. Values that JSON has no number for are the strings "NaN", "Infinity", "-Infinity"."""
        document = {"passed": self.passed, **asdict(self)}
        return json.dumps(finite(document), indent=2, allow_nan=False)


def finite(value: Any) -> Any:
    """The same with the numbers that JSON lacks as strings: "NaN", "Infinity", "-Infinity"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def number(value: float) -> str:
    """A value as tables show it: four significant digits."""
    return f"{value:.4g}"


def tables_from_report(report: ComparisonReport) -> RenderableType:
    """The report as the terminal shows it."""
    parts: list[RenderableType] = [_side_table(report), _check_table(report)]
    if report.outputs:
        parts.append(_output_table(report))
    if report.prompts:
        parts.append(_prompt_table(report))
    failed = [check.title for check in report.checks if not check.passed]
    verdict = (
        Text("Within tolerance.", "bold green")
        if report.passed
        else Text(f"BEYOND TOLERANCE: {', '.join(failed)}", "bold red")
    )
    return Group(*parts, verdict)


def _side_table(report: ComparisonReport) -> Table:
    table = Table(title="Compared", title_justify="left", show_header=False)
    for label, side in (("A", report.a), ("B", report.b)):
        table.add_row(label, side.description, Text(f"{side.name}, sha256 {side.sha256[:12]}"))
    for key, value in report.settings.items():
        table.add_row("", key, Text(value))
    return table


def _check_table(report: ComparisonReport) -> RenderableType:
    origins = list(dict.fromkeys(check.origin for check in report.checks))
    table = Table(title="Checks", title_justify="left")
    for heading in ("check", "value", "limit", "", "note"):
        table.add_column(heading, justify="right" if heading in ("value", "limit") else "left")
    for check in report.checks:
        verdict = Text("pass", "green") if check.passed else Text("FAIL", "bold red")
        sign = "<=" if check.direction == "at most" else ">="
        limit = f"{sign} {number(check.limit)} ({origins.index(check.origin) + 1})"
        table.add_row(Text(check.title), number(check.value), limit, verdict, Text(check.note))
    sources = [Text(f"Limit ({index}): {origin}", "dim") for index, origin in enumerate(origins, 1)]
    return Group(table, *sources)


def _output_table(report: ComparisonReport) -> Table:
    table = Table(title="Outputs", title_justify="left")
    for heading in ("output", "shape", "max |a-b|", "mean |a-b|", "median |a-b|", "max |a-b|/|b|", "note"):
        table.add_column(heading, justify="left" if heading in ("output", "note") else "right")
    for row in report.outputs:
        errors = (number(value) for value in (row.max_abs, row.mean_abs, row.median_abs, row.max_rel))
        table.add_row(Text(row.name), row.shape, *errors, Text(row.note))
    return table


def _prompt_table(report: ComparisonReport) -> Table:
    table = Table(title="Greedy generation", title_justify="left")
    for heading in ("prompt", "prompt tokens", "agreeing tokens", "note"):
        table.add_column(heading, justify="right" if heading.endswith("tokens") else "left")
    for row in report.prompts:
        table.add_row(Text(row.title), str(row.prompt_tokens), f"{row.agreed} of {row.tokens}", Text(row.note))
    return table
