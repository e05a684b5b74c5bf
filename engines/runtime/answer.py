"""One answer in the making: its sequence, how its tokens are chosen, where they go, and when things happened to it.

`Outbox` hands results out in the order in which they came about; the worker lets it run beside a step.
"""

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from engines.runtime.guidance import GuideState
from engines.runtime.metrics import EngineMetrics
from engines.runtime.packing import GREEDY, RowSampling
from engines.runtime.request import FinishReason, SamplingParams, TokenChunk
from engines.runtime.sampler import logprobs_of
from engines.runtime.sequence import Sequence
from engines.runtime.speculation import PromptLookup
from engines.runtime.stream import Stream
from engines.runtime.tokenizer import TextStream

_MOST_TOP_K = 2**31 - 1
"""Of an int32; more keeps all tokens anyway."""


@dataclass(eq=False)
class Answer:
    """State of one answer; the worker's thread alone touches it."""

    sequence: Sequence
    sampling: SamplingParams
    generator: np.random.Generator
    stream: Stream
    seed: int = 0
    """Of the draws that a step makes by itself."""
    eos: frozenset[int] = frozenset()
    """Tokens that end it."""
    text: TextStream | None = None
    guide: GuideState | None = None
    lookup: PromptLookup | None = None
    forks: list["Answer"] = field(default_factory=list)
    """Answers that begin with this one's next token, each with a choice of its own."""
    started: bool = False
    last_token: float | None = None
    """When its latest token was chosen."""

    def __post_init__(self) -> None:
        # Its end depends on its text, so each token's text is made before the next step; else it may wait.
        self._new_text: str | None = "" if self.sampling.stop else None

    @property
    def chosen_on_host(self) -> bool:
        """Whether its tokens depend on more than logits and seed: on what came before, or on guidance."""
        return self.guide is not None or self.sampling.adjusts_logits

    @property
    def wants_logits(self) -> bool:
        """Whether its next token takes logits on the host."""
        return self.chosen_on_host or self.sampling.logprobs is not None or bool(self.forks)

    @cached_property
    def row_sampling(self) -> RowSampling:
        """How a step samples for it."""
        if self.chosen_on_host:
            return GREEDY
        how = self.sampling
        seed = self.seed - (1 << 64) if self.seed >> 63 else self.seed
        return RowSampling(how.temperature, min(how.top_k or 0, _MOST_TOP_K), how.top_p, how.min_p, seed)

    def draft(self) -> tuple[int, ...]:
        """Tokens that may come next: those that the guidance requires, or those that followed before."""
        limit = self.sequence.max_tokens - self.sequence.generated - 1
        if self.lookup is None or limit < 1:
            return ()
        forced = () if self.guide is None else tuple(self.guide.forced())
        return forced[: min(limit, self.lookup.max_draft)] or self.lookup.propose(self.sequence.token_ids, limit)

    def accept(self, token: int) -> FinishReason | None:
        """Note a token that was appended to the sequence; says why it is the last, if it is."""
        if token in self.eos:
            return "stop"
        if self.guide is not None:
            self.guide.accept(token)
        if self._new_text is not None and self.text is not None:
            self._new_text += self.text.push(token)
            if self.text.stopped:
                return "stop"
        if self.guide is not None and self.guide.finished:
            return "stop"
        return "length" if self.sequence.used_up else None

    def take_text(self) -> str | None:
        """Text that became certain since the last call; None if it is still to be made from the tokens."""
        text, self._new_text = self._new_text, None if self._new_text is None else ""
        return text


@dataclass(frozen=True)
class _Result:
    """What one step gave to one answer: `text` where it is known already, `rows` where log-probabilities are wanted."""

    answer: Answer
    tokens: tuple[int, ...]
    text: str | None
    rows: SequenceOf[NDArray[np.float32]]
    reason: FinishReason | None
    error: BaseException | None


class Outbox:
    """Results that wait to be detokenised and handed to their readers."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._results: list[_Result] = []

    def put(
        self,
        answer: Answer,
        tokens: tuple[int, ...] = (),
        *,
        text: str | None = None,
        rows: SequenceOf[NDArray[np.float32]] = (),
        reason: FinishReason | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Queue a result; `text` None means that it is still to be made from the tokens."""
        self._results.append(_Result(answer, tokens, text, rows, reason, error))

    def deliver(self) -> list[tuple[Answer, BaseException]]:
        """Hand everything out. Returns the answers whose text could not be made, which the caller ends."""
        results, self._results = self._results, []
        failed: list[tuple[Answer, BaseException]] = []
        for result in results:
            if any(result.answer is answer for answer, _ in failed):
                continue
            try:
                self._deliver(result)
            except Exception as error:
                failed.append((result.answer, error))
        return failed

    def _deliver(self, result: _Result) -> None:
        answer = result.answer
        if answer.stream.done:
            return
        if result.error is not None:
            self._done(answer, "error")
            answer.stream.fail(result.error)
            return
        text = result.text
        if text is None:
            text = _text_of(answer, result.tokens)
        if result.reason is not None:
            if answer.text is not None:
                text += answer.text.finish()
            self._done(answer, result.reason)
        wanted = answer.sampling.logprobs
        logprobs = (
            ()
            if wanted is None
            else tuple(logprobs_of(row, token, wanted) for row, token in zip(result.rows, result.tokens, strict=True))
        )
        answer.stream.push(TokenChunk(result.tokens, text, result.reason, logprobs))

    def _done(self, answer: Answer, outcome: str) -> None:
        self._metrics.finished(outcome)
        self._metrics.request_seconds.observe(time.monotonic() - answer.sequence.arrival)


def _text_of(answer: Answer, tokens: tuple[int, ...]) -> str:
    if answer.text is None:
        return ""
    return "".join(answer.text.push(token) for token in tokens if token not in answer.eos)
