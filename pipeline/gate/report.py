"""The gate's verdict: frozen data, as JSON and as terminal tables. Knows nothing of how values were measured."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.compare.report import Check, Side, finite, number
from pipeline.gate.generation import WrittenRow
from pipeline.gate.layers import LayerRow
from pipeline.gate.limits import METRICS, Dimension
from pipeline.gate.metrics import Bin
from plugins.errors import KilnError

_WORST = 10
"""Layers that tables show."""


@dataclass(frozen=True)
class GateCheck:
    """One value on one stratum. `limit` None: nothing gives a limit, so it is reported and not judged."""

    dimension: Dimension
    stratum: str
    check: Check
    judged: bool = True

    @property
    def failed(self) -> bool:
        return self.judged and not self.check.passed


@dataclass(frozen=True)
class StratumReport:
    """What was measured on one length class; `noise` are the accepted change's values of the same metrics, `reordered`
    what other sums alone do: ONNX Runtime's rewrites off, other steps."""

    name: str
    description: str
    facts: Mapping[str, float]
    noise: Mapping[str, float]
    reordered: Mapping[str, float] = field(default_factory=dict)
    thousands: tuple[Bin, ...] = ()
    curve: tuple[Bin, ...] = ()
    layers: tuple[LayerRow, ...] = ()
    prompts: tuple[WrittenRow, ...] = ()


@dataclass(frozen=True)
class Trial:
    """A candidate with some layers put back to float, and the checks that still failed."""

    keep: tuple[str, ...]
    failed: tuple[str, ...]


@dataclass(frozen=True)
class KeepAdvice:
    """Layers to keep in float. `verified`: a candidate with them kept was made and passed."""

    keep: tuple[str, ...]
    verified: bool
    ranking: tuple[str, ...]
    """All layers, the one that adds most noise first."""
    trials: tuple[Trial, ...] = ()


@dataclass(frozen=True)
class GateReport:
    """Everything that one gate found."""

    created: str
    schemes: tuple[str, ...]
    reference: Side
    candidate: Side
    machine: Mapping[str, str]
    settings: Mapping[str, str]
    checks: tuple[GateCheck, ...]
    strata: tuple[StratumReport, ...]
    noise_origin: str = ""
    unmatched_layers: tuple[str, ...] = ()
    advice: KeepAdvice | None = None

    @property
    def failures(self) -> tuple[GateCheck, ...]:
        return tuple(check for check in self.checks if check.failed)

    @property
    def passed(self) -> bool:
        """Whether every judged check is within its limit; a report without judged checks has not passed."""
        return any(check.judged for check in self.checks) and not self.failures

    def sentence(self) -> str:
        """The verdict in one line."""
        judged = sum(check.judged for check in self.checks)
        if self.passed:
            return f"the gate passed: all {judged} checks are within their limits"
        worst = [f"{check.check.title} on '{check.stratum}'" for check in self.failures]
        text = f"the gate failed in {len(worst)} of {judged} checks: {'; '.join(worst[:4])}"
        return text + (f"; and {len(worst) - 4} more" if len(worst) > 4 else "")

    def to_json(self) -> str:
        """One JSON document; values that JSON has no number for are strings."""
        return json.dumps(finite({"passed": self.passed, **asdict(self)}), indent=1, allow_nan=False)


class GateFailedError(KilnError):
    """The candidate is beyond its limits; `report` says where, and what to keep in float."""

    def __init__(self, report: GateReport) -> None:
        self.report = report
        super().__init__(f"{report.sentence()}. {advice_in_words(report.advice)}")


def require_passed(report: GateReport) -> GateReport:
    """Raises GateFailedError unless the gate passed."""
    if not report.passed:
        raise GateFailedError(report)
    return report


def advice_in_words(advice: KeepAdvice | None) -> str:
    if advice is None or not advice.ranking:
        return "Its layers could not be compared with the reference's, so none is named; use a finer scheme"
    options = " ".join(f"--keep {name}" for name in advice.keep)
    if advice.verified:
        return f"It passes with {len(advice.keep)} layers kept in float: {options}"
    if advice.trials:
        return f"No set of layers that was tried makes it pass; the worst are: {options}. Use a finer scheme"
    return f"The layers that add most noise, not tried: {options}"


def reordered_in_words(stratum: StratumReport) -> str:
    """What other sums do to the reference, by metric."""
    return "; ".join(f"{METRICS[name].title} {number(value)}" for name, value in stratum.reordered.items())


def tables_from_report(report: GateReport) -> RenderableType:
    """The report as the terminal shows it."""
    parts: list[RenderableType] = [_check_table(report)]
    for stratum in report.strata:
        if len(stratum.thousands) > 1:
            parts.append(_position_table(stratum))
        if stratum.reordered:
            parts.append(Text(f"Other sums alone, stratum '{stratum.name}': {reordered_in_words(stratum)}", "dim"))
    if layers := [(stratum.name, row) for stratum in report.strata for row in stratum.layers]:
        parts.append(_layer_table(layers))
    if any(stratum.prompts for stratum in report.strata):
        parts.append(_prompt_table(report))
    if report.passed:
        return Group(*parts, Text(report.sentence(), "bold green"))
    advice = advice_in_words(report.advice)
    return Group(*parts, Text(report.sentence(), "bold red"), Text(advice, "yellow"))


def _check_table(report: GateReport) -> RenderableType:
    origins = list(dict.fromkeys(item.check.origin for item in report.checks if item.judged))
    table = Table(title=f"Gate for {', '.join(report.schemes)}", title_justify="left")
    for heading in ("dimension", "stratum", "check", "value", "noise floor", "limit", ""):
        table.add_column(heading, justify="right" if heading in ("value", "noise floor", "limit") else "left")
    noise = {(stratum.name, name): value for stratum in report.strata for name, value in stratum.noise.items()}
    for item in report.checks:
        check = item.check
        floor = noise.get((item.stratum, check.name))
        cells = [item.dimension, Text(item.stratum), Text(check.title), number(check.value)]
        cells.append("" if floor is None else number(floor))
        if item.judged:
            sign = "<=" if check.direction == "at most" else ">="
            cells.append(f"{sign} {number(check.limit)} ({origins.index(check.origin) + 1})")
            cells.append(Text("FAIL", "bold red") if item.failed else Text("pass", "green"))
        else:
            cells += ["", Text("not judged", "dim")]
        table.add_row(*cells)
    return Group(table, *(Text(f"Limit ({index}): {origin}", "dim") for index, origin in enumerate(origins, 1)))


def _position_table(stratum: StratumReport) -> Table:
    table = Table(title=f"By position in the context, stratum '{stratum.name}'", title_justify="left")
    for heading in ("positions", "tokens", "perplexity", "candidate's", "change", "mean KL", "top-1"):
        table.add_column(heading, justify="right")
    for row in stratum.thousands:
        change = row.perplexity_candidate / row.perplexity_reference - 1
        table.add_row(
            f"{row.start}-{row.end - 1}",
            str(row.tokens),
            number(row.perplexity_reference),
            number(row.perplexity_candidate),
            f"{change:+.2%}",
            number(row.kl_mean),
            f"{row.top1_agreement:.1%}",
        )
    return table


def _layer_table(layers: list[tuple[str, LayerRow]]) -> Table:
    table = Table(title=f"The {_WORST} layers that add most noise", title_justify="left")
    for heading in ("layer", "stratum", "SNR, dB", "cosine", "largest error", "noise added"):
        table.add_column(heading, justify="left" if heading in ("layer", "stratum") else "right")
    for stratum, row in sorted(layers, key=lambda item: -item[1].added)[:_WORST]:
        figures = (number(row.snr_db), f"{row.cosine:.6f}", number(row.max_error), number(row.added))
        table.add_row(Text(row.name), Text(stratum), *figures)
    return table


def _prompt_table(report: GateReport) -> Table:
    table = Table(title="Greedy continuations", title_justify="left")
    for heading in (
        "stratum",
        "prompt",
        "generated",
        "agree",
        "equal",
        "repeated",
        "candidate's",
        "nats",
        "candidate's",
    ):
        table.add_column(heading, justify="left" if heading == "stratum" else "right")
    for stratum in report.strata:
        for row in stratum.prompts:
            found = (
                row.repetition_reference,
                row.repetition_candidate,
                row.surprise_reference,
                row.surprise_candidate,
            )
            agreed = row.agreement
            table.add_row(
                Text(row.stratum),
                str(row.prompt_tokens),
                str(row.generated),
                f"{agreed.agreed} of {agreed.tokens}",
                str(agreed.equal),
                *("" if value is None else number(value) for value in found),
            )
    return table
