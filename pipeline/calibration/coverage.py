"""The coverage gate: whether calibration data reaches every length that the traffic has, and what to add.

Ranges of short texts say little about long ones: a set that leaves a stratum empty or thin is refused. Knows lengths
only, of samples and of requests.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.calibration.strata import Strata, Stratum
from pipeline.load_test.trace import trace_from_file
from plugins.errors import KilnError

_BAR = 24


@dataclass(frozen=True)
class CoverageLimits:
    """What a stratum that the traffic has needs at least."""

    min_samples: int = 4
    min_tokens: int = 256
    """In all of the stratum's samples; where samples have lengths."""
    min_share: float = 0.25
    """Of the traffic's share of requests in the stratum, as share of samples; a half at most, so that all strata can
    have theirs."""

    def __post_init__(self) -> None:
        if self.min_samples < 1 or self.min_tokens < 0 or not 0 <= self.min_share <= 0.5:
            raise KilnError(
                f"coverage limits are {self.min_samples} samples, {self.min_tokens} tokens and a share of "
                f"{self.min_share}; expected at least 1, at least 0 and 0 to 0.5"
            )


@dataclass(frozen=True)
class StratumCoverage:
    """One row of the histogram. `requests` is None without traffic."""

    stratum: Stratum
    samples: int
    tokens: int
    requests: int | None
    missing_samples: int
    missing_tokens: int

    @property
    def fault(self) -> str:
        """`empty`, `thin`, or nothing."""
        if not (self.missing_samples or self.missing_tokens):
            return ""
        return "thin" if self.samples else "empty"

    @property
    def advice(self) -> str:
        """What to add, as a sentence's part."""
        tokens = f", {self.missing_tokens} tokens or more in all" if self.missing_tokens else ""
        plural = "s" if self.missing_samples > 1 else ""
        return f"add {self.missing_samples} sample{plural} of {self.stratum}{tokens}"


@dataclass(frozen=True)
class Coverage:
    """The set against the traffic, or against every stratum where no traffic is declared."""

    rows: tuple[StratumCoverage, ...]
    traffic: str | None
    """Where the traffic comes from."""
    sized: bool

    @property
    def faults(self) -> tuple[StratumCoverage, ...]:
        return tuple(row for row in self.rows if row.fault)

    @property
    def sentence(self) -> str:
        """What is missing and what to add; empty where nothing is."""
        if not self.faults:
            return ""
        against = f"the traffic {self.traffic}" if self.traffic else "the model's context"
        found = ", ".join(f"{row.stratum.name} is {row.fault}" for row in self.faults)
        if not self.sized:
            return f"the set is thin: {self.rows[0].samples} samples; add {self.rows[0].missing_samples}"
        return f"against {against}, {found}; {'; '.join(row.advice for row in self.faults)}"

    def histogram(self) -> str:
        """Bars of text for set and traffic by stratum."""
        samples = sum(row.samples for row in self.rows) or 1
        requests = sum(row.requests or 0 for row in self.rows) or 1
        name = max(len(row.stratum.name) for row in self.rows)
        where = max(len(str(row.stratum)) for row in self.rows) if self.sized else 0
        lines = []
        for row in self.rows:
            head = f"{row.stratum.name:<{name}}  {str(row.stratum) if self.sized else '':<{where}}"
            tokens = f", {row.tokens} tokens" if self.sized else ""
            fault = f"  <- {row.fault}" if row.fault else ""
            lines.append(f"{head}  set     {_bar(row.samples / samples)} {row.samples} samples{tokens}{fault}")
            if row.requests is not None:
                indent = " " * len(head)
                lines.append(f"{indent}  traffic {_bar(row.requests / requests)} {row.requests} requests")
        return "\n".join(lines)

    def require(self) -> None:
        """Raise KilnError with the histogram unless every stratum is covered."""
        if self.faults:
            raise KilnError(
                f"the calibration set does not cover what the model will see: {self.sentence}; or accept it with "
                f"--override-coverage\n{self.histogram()}"
            )


def _bar(share: float) -> str:
    return f"{'█' * math.ceil(share * _BAR):<{_BAR}} {share:4.0%}"


def coverage_of(
    lengths: Sequence[int],
    strata: Strata,
    traffic: Sequence[int] | None = None,
    origin: str | None = None,
    limits: CoverageLimits = CoverageLimits(),
) -> Coverage:
    """`lengths` in tokens, of the set's samples; `traffic`: of requests, prompt and output together."""
    members = {stratum.name: [length for length in lengths if strata.of(length) == stratum.name] for stratum in strata}
    wanted = Counter(strata.of(min(length, strata.limit)) for length in traffic or ())
    needed = [stratum for stratum in strata if traffic is None or wanted[stratum.name]]
    tokens = {
        stratum.name: max(0, limits.min_tokens - sum(members[stratum.name])) if strata.sized else 0
        for stratum in needed
    }
    missing = dict.fromkeys(strata.names, 0)
    changed = True
    while changed:  # samples that are added to one stratum make the others' shares smaller
        total, changed = len(lengths) + sum(missing.values()), False
        for stratum in needed:
            name = stratum.name
            share = wanted[name] / wanted.total() if traffic is not None else 0
            least = max(limits.min_samples, math.ceil(limits.min_share * share * total)) - len(members[name])
            short = max(least, math.ceil(tokens[name] / stratum.longest))
            if short > missing[name]:
                missing[name], changed = short, True
    return Coverage(
        tuple(
            StratumCoverage(
                stratum,
                samples=len(members[stratum.name]),
                tokens=sum(members[stratum.name]),
                requests=None if traffic is None else wanted[stratum.name],
                missing_samples=missing[stratum.name],
                missing_tokens=tokens.get(stratum.name, 0),
            )
            for stratum in strata
        ),
        origin,
        strata.sized,
    )


def traffic_lengths(
    path: Path, encode: Callable[[str], list[int]] | None, chat: Callable[..., list[int]] | None
) -> list[int]:
    """Tokens of each request of a trace, prompt and output together. Raises KilnError.

    `encode` and `chat` are a tokenizer's, for prompts that are text or messages.
    """
    lengths = []
    for request in trace_from_file(path):
        if request.prompt_tokens is not None:
            prompt = request.prompt_tokens
        elif isinstance(request.prompt, tuple):
            prompt = len(request.prompt)
        elif encode is None or chat is None:
            raise KilnError(f"{path} has prompts as text, and the model comes without a tokenizer; give --tokenizer")
        elif request.prompt is not None:
            prompt = len(encode(request.prompt))
        else:
            prompt = len(chat([message.model_dump() for message in request.messages or ()]))
        lengths.append(prompt + request.output_tokens)
    return lengths
