"""What is asked and when: requests with arrival times and lengths, read from a file or drawn from distributions.

Knows nothing of who answers. Everything drawn is reproducible from a seed.

JSON Lines, one request a line; an unknown key is an error:

    {"arrival": 0.35, "prompt_tokens": 812, "output_tokens": 64}
    {"arrival": 0.90, "prompt_tokens": 640, "output_tokens": 32, "prefix": "support", "prefix_tokens": 512}
    {"arrival": 1.20, "prompt": "Once upon a time", "output_tokens": 16, "lane": "batch"}
    {"arrival": 1.50, "messages": [{"role": "user", "content": "Hello"}], "output_tokens": 16}

CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens: the Azure LLM inference traces
(https://github.com/Azure/AzurePublicDataset).
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engines.runtime.sequence import Lane
from plugins.errors import KilnError, first_problem

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOST_TOKENS = 10**7
_RANDOM, _PREFIX, _ARRIVALS, _LENGTHS = range(4)
"""Streams of random numbers, so that one does not change when another is drawn from more often."""

TokenCount = Annotated[int, Field(ge=1, le=_MOST_TOKENS)]


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str


class TraceRequest(BaseModel):
    """One request. Arrival in seconds after the start.

    Either `prompt_tokens`, for random tokens, or a prompt: `prompt` as text or as token ids, or `messages`. Requests
    with the same `prefix` begin with the same `prefix_tokens` random tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    arrival: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    prompt_tokens: TokenCount | None = None
    output_tokens: TokenCount
    lane: Lane = "interactive"
    prefix: str | None = None
    prefix_tokens: TokenCount | None = None
    prompt: str | tuple[Annotated[int, Field(ge=0)], ...] | None = None
    messages: tuple[Message, ...] | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> "TraceRequest":
        if sum(kind is not None for kind in (self.prompt_tokens, self.prompt, self.messages)) != 1:
            raise ValueError("give one of prompt_tokens, prompt and messages")
        if self.prompt in ("", ()) or self.messages == ():
            raise ValueError("the prompt is empty")
        if (self.prefix is None) != (self.prefix_tokens is None):
            raise ValueError("prefix and prefix_tokens go together")
        if self.prefix_tokens is not None and (self.prompt_tokens is None or self.prefix_tokens > self.prompt_tokens):
            raise ValueError("prefix_tokens needs prompt_tokens, at least as many")
        return self

    def token_ids(self, index: int, seed: int, vocabulary: int) -> tuple[int, ...]:
        """Random tokens for the request at `index` of its trace, the prefix by its name; only for `prompt_tokens`."""
        assert self.prompt_tokens is not None
        shared = self.prefix_tokens or 0
        own = np.random.default_rng([seed, _RANDOM, index]).integers(0, vocabulary, self.prompt_tokens - shared)
        if not shared:
            return tuple(own.tolist())
        name = (self.prefix or "").encode()
        prefix = np.random.default_rng([seed, _PREFIX, *name]).integers(0, vocabulary, shared)
        return (*prefix.tolist(), *own.tolist())


Trace = tuple[TraceRequest, ...]
"""In the order of arrival."""


@dataclass(frozen=True)
class Lengths:
    """A lognormal distribution of token counts, clipped to [`shortest`, `longest`]; sigma 0 is one fixed length."""

    median: float
    sigma: float = 0.0
    shortest: int = 1
    longest: int = _MOST_TOKENS

    def __post_init__(self) -> None:
        if not (math.isfinite(self.median) and self.median >= 1):
            raise KilnError(f"the median length is {self.median}; expected at least 1 token")
        if not (math.isfinite(self.sigma) and self.sigma >= 0):
            raise KilnError(f"sigma, of the logarithm of the length, is {self.sigma}; expected 0 or more")
        if not 1 <= self.shortest <= self.longest <= _MOST_TOKENS:
            raise KilnError(
                f"lengths are clipped to {self.shortest} to {self.longest}; expected 1 <= shortest <= longest"
            )

    def draw(self, count: int, generator: np.random.Generator) -> list[int]:
        values = np.exp(math.log(self.median) + self.sigma * generator.standard_normal(count))
        lengths: list[int] = np.clip(np.rint(values), self.shortest, self.longest).astype(int).tolist()
        return lengths

    def sentence(self) -> str:
        """For people."""
        if not self.sigma:
            return f"of {self.median:.0f} tokens"
        limits = f" from {self.shortest} to {self.longest}" if self.longest < _MOST_TOKENS else ""
        return f"lognormal{limits} with median {self.median:.0f} and sigma {self.sigma:.2f}"


def lengths_from_text(text: str) -> Lengths:
    """`MEDIAN[,SIGMA[,SHORTEST,LONGEST]]`. Raises KilnError."""
    try:
        median, *rest = (float(part) for part in text.split(","))
        sigma = rest[0] if rest else 0.0
        limits = [int(limit) for limit in rest[1:]]
    except (ValueError, OverflowError) as error:
        raise KilnError(f"lengths are {text!r}; expected MEDIAN,SIGMA as in 256,0.6") from error
    if len(limits) not in (0, 2):
        raise KilnError(f"lengths are {text!r}; expected MEDIAN, or MEDIAN,SIGMA, or MEDIAN,SIGMA,SHORTEST,LONGEST")
    return Lengths(median, sigma, *limits)


@dataclass(frozen=True)
class Workload:
    """Distributions to draw a trace from.

    Gaps between arrivals have a gamma distribution with mean 1 / `rate` and coefficient of variation `burstiness`:
    1 is a Poisson process, more comes in bursts, 0 is a metronome.
    """

    prompt: Lengths = Lengths(256, 0.6)
    output: Lengths = Lengths(64, 0.6)
    rate: float = 1.0
    burstiness: float = 1.0
    shared_prefix: int = 0
    """Tokens that every prompt begins with, besides its own length."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise KilnError(f"the rate is {self.rate}; expected requests/s above 0")
        if not 0 <= self.burstiness <= 100:
            raise KilnError(f"burstiness is {self.burstiness}; expected 0 (evenly spaced), 1 (Poisson) or up to 100")
        if not 0 <= self.shared_prefix <= _MOST_TOKENS:
            raise KilnError(f"the shared prefix has {self.shared_prefix} tokens; expected 0 or more")

    def draw(self, count: int, seed: int) -> Trace:
        """`count` requests, the first at 0 s."""
        if count < 1:
            raise KilnError(f"the trace has {count} requests; expected at least 1")
        arrivals = np.cumsum([0.0, *self._gaps(count - 1, np.random.default_rng([seed, _ARRIVALS]))]).tolist()
        lengths = np.random.default_rng([seed, _LENGTHS])
        prompts, outputs = self.prompt.draw(count, lengths), self.output.draw(count, lengths)
        prefix, shared = ("shared", self.shared_prefix) if self.shared_prefix else (None, None)
        return tuple(
            TraceRequest(
                arrival=arrival,
                prompt_tokens=prompt + self.shared_prefix,
                output_tokens=output,
                prefix=prefix,
                prefix_tokens=shared,
            )
            for arrival, prompt, output in zip(arrivals, prompts, outputs, strict=True)
        )

    def _gaps(self, count: int, generator: np.random.Generator) -> Sequence[float]:
        if self.burstiness == 0:
            return [1 / self.rate] * count
        shape = self.burstiness**-2
        gaps: list[float] = generator.gamma(shape, 1 / (shape * self.rate), count).tolist()
        return gaps

    def lengths(self) -> str:
        """In words."""
        shared = f" after {self.shared_prefix} shared ones" if self.shared_prefix else ""
        return f"prompts {self.prompt.sentence()}{shared}, outputs {self.output.sentence()}"

    def arrivals(self) -> str:
        """In words."""
        return f"{self.rate:.3g} requests/s with burstiness {self.burstiness:.2f}"


def workload_from_trace(trace: Trace) -> Workload:
    """Distributions with the trace's own parameters: maximum likelihood for lengths, moments for gaps.

    Raises KilnError for a trace that has no lengths or no gaps to fit.
    """
    if len(trace) < 3:
        raise KilnError(f"the trace has {len(trace)} requests; expected at least 3 to fit distributions to")
    if any(request.prompt_tokens is None for request in trace):
        raise KilnError("the trace has prompts as text; expected prompt_tokens on every line to fit lengths to")
    gaps = np.diff([request.arrival for request in trace])
    mean = float(gaps.mean())
    if not mean > 0:
        raise KilnError("all requests of the trace arrive at one moment; expected arrival times that differ")
    return Workload(
        prompt=_fitted_lengths([request.prompt_tokens or 0 for request in trace]),
        output=_fitted_lengths([request.output_tokens for request in trace]),
        rate=1 / mean,
        burstiness=min(float(gaps.std(ddof=1)) / mean, 100.0),
    )


def _fitted_lengths(lengths: Sequence[int]) -> Lengths:
    logarithms = np.log(lengths)
    return Lengths(float(np.exp(logarithms.mean())), float(logarithms.std()), min(lengths), max(lengths))


def trace_from_file(path: Path) -> Trace:
    """Read JSON Lines or an Azure CSV, by content. Raises KilnError naming the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise KilnError(f"the trace {path} cannot be read: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise KilnError(f"the trace {path} is not UTF-8 text ({error}); expected JSON Lines or CSV") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise KilnError(f"the trace {path} is empty; expected a request on each line")
    if numbered[0][1].lstrip().startswith("{"):
        requests = [_request_from_json(path, number, line) for number, line in numbered]
    else:
        requests = _requests_from_csv(path, numbered)
    return tuple(sorted(requests, key=lambda request: request.arrival))


def _request_from_json(path: Path, number: int, line: str) -> TraceRequest:
    try:
        return TraceRequest.model_validate_json(line)
    except ValidationError as error:
        where, problem = first_problem(error)
        raise KilnError(
            f"{path}, line {number}: {f'{where}: ' if where else ''}{problem}; expected an object such as "
            '{"arrival": 0.5, "prompt_tokens": 300, "output_tokens": 50}'
        ) from error


def _requests_from_csv(path: Path, numbered: Sequence[tuple[int, str]]) -> list[TraceRequest]:
    rows = csv.DictReader(line for _, line in numbered)
    absent = [name for name in _AZURE if name not in (rows.fieldnames or ())]
    if absent:
        raise KilnError(
            f"{path} is neither JSON Lines nor a CSV with the columns {', '.join(_AZURE)}: it lacks {', '.join(absent)}"
        )
    found = []
    for (number, _), row in zip(numbered[1:], rows, strict=False):
        try:
            time = datetime.fromisoformat(row["TIMESTAMP"]).astimezone(UTC)
            prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            # A prompt that is answered with nothing still ends with a first token.
            found.append((time, TraceRequest(prompt_tokens=prompt, output_tokens=max(1, output))))
        except (TypeError, ValueError) as error:
            raise KilnError(
                f"{path}, line {number} is {','.join(map(str, row.values()))!r:.100}; expected a time such as "
                "2023-11-16 18:15:46.68 and two token counts of at least 1"
            ) from error
    if not found:
        raise KilnError(f"the trace {path} has a heading and nothing else; expected a request on each line")
    start = min(time for time, _ in found)
    return [request.model_copy(update={"arrival": (time - start).total_seconds()}) for time, request in found]


def adapted(
    trace: Trace,
    *,
    limit: int | None = None,
    speed: float = 1.0,
    most_prompt: int | None = None,
    most_output: int | None = None,
) -> Trace:
    """The first `limit` requests, `speed` times as fast, random prompts and outputs cut to so many tokens."""
    for name, value in (("limit", limit), ("longest prompt", most_prompt), ("longest output", most_output)):
        if value is not None and value < 1:
            raise KilnError(f"the {name} is {value}; expected at least 1")
    if not (math.isfinite(speed) and speed > 0):
        raise KilnError(f"speed is {speed}; expected a number above 0, 2 for twice as fast")
    return tuple(_adapted(request, speed, most_prompt, most_output) for request in trace[:limit])


def _adapted(request: TraceRequest, speed: float, most_prompt: int | None, most_output: int | None) -> TraceRequest:
    changes: dict[str, object] = {"arrival": request.arrival / speed}
    if most_output is not None:
        changes["output_tokens"] = min(request.output_tokens, most_output)
    if most_prompt is not None and request.prompt_tokens is not None:
        changes["prompt_tokens"] = min(request.prompt_tokens, most_prompt)
        if request.prefix_tokens is not None:
            changes["prefix_tokens"] = min(request.prefix_tokens, most_prompt)
    return request.model_copy(update=changes)


def jsonl_from_trace(trace: Trace) -> str:
    """The trace as JSON Lines, to be replayed elsewhere."""
    return "".join(request.model_dump_json(exclude_defaults=True) + "\n" for request in trace)
