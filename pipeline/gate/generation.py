"""What both sides write: greedy agreement, repetition, and how surprising long continuations are to the reference.

A small model's greedy text repeats itself, whatever its precision: repetition and surprise are therefore those of the
candidate beyond those of the reference on the same prompts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engines.runtime.request import RequestError
from pipeline.compare.engine_subject import EngineDecoder
from pipeline.compare.greedy import Prompt
from pipeline.compare.subjects import DecoderSubject
from pipeline.gate.material import DecoderData
from pipeline.gate.metrics import Agreement, agreement, repetition
from plugins.errors import KilnError


@dataclass(frozen=True)
class GenerationConfig:
    """Lengths in tokens."""

    greedy: int = 64
    """After every prompt, for agreement."""
    continuation: int = 2048
    """After the last `continued` prompts of each stratum, for repetition and drift; 0: none."""
    continued: int = 3
    ngram: int = 4
    running: int = 16
    """Texts that are generated at the same time."""

    def __post_init__(self) -> None:
        for name, least in (("greedy", 1), ("continuation", 0), ("continued", 0), ("ngram", 1), ("running", 1)):
            if getattr(self, name) < least:
                raise KilnError(f"{name} is {getattr(self, name)}; expected at least {least}")


def generation_within(max_context: int) -> GenerationConfig:
    """The usual lengths, or shorter ones where a context holds little more than them."""
    usual = GenerationConfig()
    return replace(
        usual,
        greedy=min(usual.greedy, max(1, max_context // 8)),
        continuation=min(usual.continuation, max_context // 4),
    )


@dataclass(frozen=True)
class Job:
    """One prompt and how much is generated after it."""

    stratum: str
    prompt: Prompt
    tokens: int
    long: bool


@dataclass(frozen=True)
class Written:
    """One side's continuation of one prompt; `surprise` to the reference, nats a token, only of long ones."""

    tokens: tuple[int, ...]
    surprise: float | None


@dataclass(frozen=True)
class WrittenRow:
    """One prompt with both sides. Figures of repetition and surprise are None where the continuation is short."""

    stratum: str
    title: str
    prompt_tokens: int
    generated: int
    agreement: Agreement
    repetition_reference: float | None = None
    repetition_candidate: float | None = None
    surprise_reference: float | None = None
    surprise_candidate: float | None = None


def jobs_from_data(data: DecoderData, config: GenerationConfig, max_context: int) -> tuple[Job, ...]:
    """What is generated. Raises KilnError where a prompt leaves no room for it."""
    jobs = []
    for stratum in data.strata:
        first_long = len(stratum.prompts) - config.continued if config.continuation else len(stratum.prompts)
        for index, prompt in enumerate(stratum.prompts):
            long = index >= first_long
            tokens = max(config.greedy, config.continuation) if long else config.greedy
            if not prompt.token_ids or len(prompt.token_ids) + tokens > max_context:
                raise KilnError(
                    f"a prompt of stratum '{stratum.name}' has {len(prompt.token_ids)} tokens and {tokens} are to be "
                    f"generated after it; the context holds {max_context}: shorten one of them"
                )
            jobs.append(Job(stratum.name, prompt, tokens, long))
    return tuple(jobs)


def write(subject: DecoderSubject, reference: DecoderSubject, jobs: Sequence[Job], chunk: int) -> list[Written]:
    """Generate all texts with `subject`, together where it can, and score the long ones with `reference`.

    Raises KilnError where the subject gives logits that are no numbers.
    """
    try:
        texts = _generated(subject, jobs)
    except RequestError as error:
        raise KilnError(f"{subject.side.name} cannot generate: {error}") from error
    return [
        Written(tuple(text), _surprise(reference, job.prompt.token_ids, text, chunk) if job.long else None)
        for job, text in zip(jobs, texts, strict=True)
    ]


def _generated(subject: DecoderSubject, jobs: Sequence[Job]) -> list[list[int]]:
    if isinstance(subject, EngineDecoder):
        prompts = [job.prompt.token_ids for job in jobs]
        return subject.generate_together(prompts, [job.tokens for job in jobs])
    return [subject.generate_greedy(job.prompt.token_ids, job.tokens) for job in jobs]


def _surprise(reference: DecoderSubject, prompt: Sequence[int], text: Sequence[int], chunk: int) -> float:
    """Mean negative log-likelihood of `text` after `prompt`, nats a token; its exponential is a perplexity."""
    whole, total, done = [*prompt, *text], 0.0, 0
    for logits in reference.logits(whole[:-1], chunk):
        following = np.asarray(whole[done + 1 : done + 1 + len(logits)], np.int64)
        here = np.arange(len(logits)) + done + 1 >= len(prompt)
        values = logits[here].astype(np.float64)
        if len(values):
            largest = values.max(axis=1)
            log_sum = largest + np.log(np.exp(values - largest[:, None]).sum(axis=1))
            total += float((log_sum - values[np.arange(len(values)), following[here]]).sum())
        done += len(logits)
    return total / len(text)


def compare_written(
    jobs: Sequence[Job], a: Sequence[Written], b: Sequence[Written], config: GenerationConfig
) -> list[WrittenRow]:
    rows = []
    for job, ours, theirs in zip(jobs, a, b, strict=True):
        same = agreement(ours.tokens, theirs.tokens, config.greedy)
        row = WrittenRow(job.stratum, job.prompt.title, len(job.prompt.token_ids), job.tokens, same)
        if job.long:
            row = replace(
                row,
                repetition_reference=repetition(ours.tokens, config.ngram),
                repetition_candidate=repetition(theirs.tokens, config.ngram),
                surprise_reference=ours.surprise,
                surprise_candidate=theirs.surprise,
            )
        rows.append(row)
    return rows


def values_of_rows(rows: Sequence[WrittenRow]) -> dict[str, float]:
    """Metrics by name of one stratum's prompts."""
    values = {"greedy_agreement": sum(r.agreement.agreed for r in rows) / sum(r.agreement.tokens for r in rows)}
    if pairs := _pairs(rows):
        values |= {name: float(np.mean([b - a for a, b in found])) for name, found in pairs.items()}
    return values


def hazard_of_rows(rows: Sequence[WrittenRow]) -> float:
    """Differences a token, of a change that everybody accepts; one more than were seen, for it is never none."""
    differ = sum(row.agreement.first_divergence is not None for row in rows)
    return (differ + 1) / (sum(row.agreement.agreed for row in rows) + differ)


def scatter_of_rows(rows: Sequence[WrittenRow], everywhere: Sequence[WrittenRow]) -> dict[str, float]:
    """How far repetition and drift of some prompts may be apart by chance: two texts that part at a near tie have
    as little in common as two prompts. The standard error of a difference of means, from the reference's own texts
    on all prompts; nothing for fewer than 3 of those."""
    return {
        name: math.sqrt(2.0 / len(found)) * float(np.std([a for a, _ in _pairs(everywhere)[name]], ddof=1))
        for name, found in _pairs(rows).items()
        if len(_pairs(everywhere)[name]) >= 3
    }


def _pairs(rows: Sequence[WrittenRow]) -> dict[str, list[tuple[float, float]]]:
    """Reference's and candidate's figures of the long continuations, by metric."""
    found: dict[str, list[tuple[float, float]]] = {"repetition": [], "drift": []}
    for row in rows:
        if row.repetition_reference is not None and row.repetition_candidate is not None:
            found["repetition"].append((row.repetition_reference, row.repetition_candidate))
        if row.surprise_reference is not None and row.surprise_candidate is not None:
            found["drift"].append((row.surprise_reference, row.surprise_candidate))
    return {name: pairs for name, pairs in found.items() if pairs}
