"""What a run shows: percentiles, throughput, goodput under limits; as JSON and as the terminal shows it."""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table

from engines.runtime.sequence import LANES
from pipeline.compare.machine import machine_description
from pipeline.load_test.run import Outcome, Run
from plugins.errors import KilnError


@dataclass(frozen=True)
class Slo:
    """Limits in seconds that an answer must keep to count as good; None: no limit.

    `inter_token` is for the mean time a token after the first of each answer.
    """

    first_token: float | None = None
    inter_token: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not (math.isfinite(value) and value > 0):
                raise KilnError(f"the limit of {name} is {value}; expected a positive number of seconds")

    @property
    def limits(self) -> dict[str, float]:
        """Those that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def met(self, outcome: Outcome) -> bool:
        """Whether an answer came whole and within both limits."""
        if not outcome.answered:
            return False
        pace = outcome.time_per_token
        return (self.first_token is None or outcome.first_token <= self.first_token) and (
            self.inter_token is None or pace is None or pace <= self.inter_token
        )


@dataclass(frozen=True)
class Percentiles:
    """Of `count` values, in seconds; all None without values."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    highest: float | None = None


def percentiles_of(values: Sequence[float]) -> Percentiles:
    """Linear interpolation between the two values beside each rank."""
    if not values:
        return Percentiles(0)
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return Percentiles(len(values), float(np.mean(values)), p50, p90, p99, max(values))


LATENCIES: Mapping[str, tuple[str, Callable[[Iterable[Outcome]], list[float]]]] = {
    "first_token": ("first token", lambda outcomes: [o.first_token for o in outcomes]),
    "inter_token": ("inter-token", lambda outcomes: [gap for o in outcomes for gap in o.gaps]),
    "time_per_token": (
        "mean inter-token of an answer",
        lambda outcomes: [pace for o in outcomes if (pace := o.time_per_token) is not None],
    ),
    "end_to_end": ("end to end", lambda outcomes: [o.end - o.due for o in outcomes if o.end is not None]),
}
"""Name to title and the values of answered requests, in seconds."""


@dataclass(frozen=True)
class ErrorCount:
    """Requests that failed in one way, and the first one's words."""

    kind: str
    count: int
    example: str


@dataclass(frozen=True)
class LoadReport:
    """Everything that one run found. Rates are per second of `seconds`; goodput is None without limits."""

    created: str
    target: str
    model: str
    workload: str
    loop: str
    machine: Mapping[str, str]
    seconds: float
    interrupted: bool
    sent: int
    answered: int
    unfinished: int
    """Neither answered nor failed when the run was interrupted."""
    errors: tuple[ErrorCount, ...]
    miscounted_prompts: int
    """Answers whose server counted other prompt tokens than were sent."""
    short_answers: int
    """Answers with fewer tokens than were asked for."""
    requests_per_second: float
    input_tokens_per_second: float
    output_tokens_per_second: float
    slo: Slo
    goodput: float | None
    good_share: float | None
    """Of all requests that came to an end."""
    latencies: Mapping[str, Percentiles]
    lanes: Mapping[str, Mapping[str, Percentiles]]
    """By lane, where the trace has several."""
    client_lag: Percentiles
    """How late requests were sent: more than a few milliseconds says that the load generator itself is too slow."""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), allow_nan=False)


def report_from_run(run: Run, *, target: str, model: str, workload: str, loop: str, slo: Slo) -> LoadReport:
    """Count and sort what was noted."""
    answered = [outcome for outcome in run.outcomes if outcome.answered]
    ended = [outcome for outcome in run.outcomes if outcome.end is not None]
    good = sum(slo.met(outcome) for outcome in answered) if slo.limits else None
    lanes = [lane for lane in LANES if any(outcome.lane == lane for outcome in run.outcomes)]
    per_second = 1 / run.seconds if run.seconds > 0 else 0.0
    return LoadReport(
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        target=target,
        model=model,
        workload=workload,
        loop=loop,
        machine=machine_description(),
        seconds=run.seconds,
        interrupted=run.interrupted,
        sent=len(run.outcomes),
        answered=len(answered),
        unfinished=len(run.outcomes) - len(ended),
        errors=_errors(ended),
        miscounted_prompts=sum(
            None not in (o.planned_prompt, o.prompt_tokens) and o.planned_prompt != o.prompt_tokens for o in answered
        ),
        short_answers=sum(_output_tokens(o) < o.planned_output for o in answered),
        requests_per_second=len(answered) * per_second,
        input_tokens_per_second=sum(o.prompt_tokens or o.planned_prompt or 0 for o in answered) * per_second,
        output_tokens_per_second=sum(_output_tokens(o) for o in run.outcomes) * per_second,
        slo=slo,
        goodput=None if good is None else good * per_second,
        good_share=None if good is None or not ended else good / len(ended),
        latencies=_latencies(answered),
        lanes={lane: _latencies([o for o in answered if o.lane == lane]) for lane in lanes} if len(lanes) > 1 else {},
        client_lag=percentiles_of([outcome.sent - outcome.due for outcome in run.outcomes]),
    )


def _latencies(answered: Sequence[Outcome]) -> dict[str, Percentiles]:
    return {name: percentiles_of(values(answered)) for name, (_, values) in LATENCIES.items()}


def _output_tokens(outcome: Outcome) -> int:
    return len(outcome.deliveries) if outcome.output_tokens is None else outcome.output_tokens


def _errors(ended: Sequence[Outcome]) -> tuple[ErrorCount, ...]:
    kinds = Counter(outcome.error for outcome in ended if outcome.error is not None)
    examples = {outcome.error: outcome.message for outcome in reversed(ended)}
    return tuple(ErrorCount(kind, count, examples[kind]) for kind, count in kinds.most_common())


def milliseconds(seconds: float | None) -> str:
    """With a digit where it tells something."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:,.1f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


LATENCY_COLUMNS = ("milliseconds", "P50", "P90", "P99", "mean", "highest", "values")


def latency_rows(report: LoadReport) -> list[tuple[str, ...]]:
    """The rows below LATENCY_COLUMNS: all requests, then each lane, then how late they were sent."""

    def row(title: str, found: Percentiles) -> tuple[str, ...]:
        values = (found.p50, found.p90, found.p99, found.mean, found.highest)
        return (title, *map(milliseconds, values), f"{found.count:,}")

    rows = [row(title, report.latencies[name]) for name, (title, _) in LATENCIES.items()]
    for lane, latencies in report.lanes.items():
        rows += [row(f"{lane}: {LATENCIES[name][0]}", found) for name, found in latencies.items()]
    return [*rows, row("sent late by", report.client_lag)]


def figure_rows(report: LoadReport) -> list[tuple[str, str]]:
    """Counts and rates, a name and a text each."""
    rows = [
        ("duration", f"{report.seconds:.1f} s"),
        ("requests", f"{report.answered} of {report.sent} answered"),
        ("throughput", f"{report.requests_per_second:.3g} requests/s"),
        ("input", f"{report.input_tokens_per_second:,.1f} tokens/s"),
        ("output", f"{report.output_tokens_per_second:,.1f} tokens/s"),
    ]
    if report.goodput is not None:
        limits = ", ".join(f"{name.replace('_', ' ')} at most {value:g} s" for name, value in report.slo.limits.items())
        share = "" if report.good_share is None else f", {report.good_share:.0%} of requests"
        rows.append(("goodput", f"{report.goodput:.3g} requests/s{share} ({limits})"))
    return rows


def remarks(report: LoadReport) -> list[str]:
    """What a reader must know before believing the figures."""
    found = [f"{error.count} failed, {error.kind}: {error.example}" for error in report.errors]
    if report.interrupted:
        found.append(
            f"Interrupted while {report.unfinished} requests were running; the rest of the trace was not sent."
        )
    if report.miscounted_prompts:
        found.append(f"{report.miscounted_prompts} prompts had another number of tokens for the server than were sent.")
    if report.short_answers:
        found.append(f"{report.short_answers} answers ended before the length that was asked for.")
    if (report.client_lag.p99 or 0) > max(0.01, 0.1 * (report.latencies["first_token"].p50 or 0)):
        found.append("Requests were sent late: this load generator is the bottleneck, and its delay is in the figures.")
    return found


def table_from_report(report: LoadReport) -> RenderableType:
    """The report as the terminal shows it."""
    figures = Table(title=f"{report.model} at {report.target}", title_justify="left", show_header=False)
    figures.add_column(style="bold")
    figures.add_column(overflow="fold")
    for name, text in [("workload", report.workload), ("loop", report.loop), *figure_rows(report)]:
        figures.add_row(name, text)
    latencies = Table(*LATENCY_COLUMNS)
    for column in latencies.columns[1:]:
        column.justify = "right"
    for row in latency_rows(report):
        latencies.add_row(*row)
    return Group(figures, latencies, *remarks(report))
