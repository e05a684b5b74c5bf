"""One measurement of one setting, on a real engine. Chooses nothing.

A decoder is measured in a closed loop: `batch` requests are always in flight, each answer makes room for the next
request. The first ones have graded lengths, so that from then on answers end one by one, as in a server that has run
for long. The window opens when all of them decode, and requests/s are the output tokens/s of the window divided by the
output tokens of a request, which counts the parts of requests at the window's ends.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, cycle, islice

import numpy as np
from numpy.typing import NDArray

from pipeline.load_test.report import Slo
from pipeline.load_test.run import LoadConfig, Outcome, Player
from pipeline.load_test.targets import Target
from pipeline.load_test.trace import Trace, TraceRequest
from pipeline.tune.search import Sample
from plugins.errors import KilnError

_POLL = 0.02
_LEAST_COMPLETIONS = 2
"""Whole requests, at least, and at least one for each place, that a measurement sees."""


class DecoderMeasure:
    """Measures engines of one model under one workload; each measurement has prompts that no other had."""

    def __init__(self, trace: Trace, slo: Slo, seed: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._trace = trace
        self._slo = slo
        self._seeds = count(seed)
        self._clock = clock
        self._mean_output = sum(request.output_tokens for request in trace) / len(trace)

    def __call__(self, target: Target, batch: int, window: float, deadline: float) -> Sample | None:
        """One measurement of at least `window` seconds; None when `deadline`, by the clock, comes first."""
        return asyncio.run(self._measure(target, batch, window, deadline))

    async def _measure(self, target: Target, batch: int, window: float, deadline: float) -> Sample | None:
        player = Player(target, LoadConfig(seed=next(self._seeds), warmup=0))
        users = asyncio.create_task(player.closed_loop(self._requests(batch), batch))
        try:
            while (opened := _all_decode(player.outcomes, batch)) is None:
                if not await self._goes_on(users, player, deadline):
                    return None
            while player.now() - opened < window or len(_whole(player.outcomes, batch, opened)) < _enough(batch):
                if not await self._goes_on(users, player, deadline):
                    return None
            return self._sample(player.outcomes, batch, opened, player.now())
        finally:
            users.cancel()
            await asyncio.gather(users, return_exceptions=True)

    def _requests(self, batch: int) -> Iterator[TraceRequest]:
        """Without end; the first `batch` have graded output lengths."""
        endless = cycle(self._trace)
        for place, request in enumerate(islice(endless, batch), 1):
            yield request.model_copy(update={"output_tokens": math.ceil(request.output_tokens * place / batch)})
        yield from endless

    async def _goes_on(self, users: "asyncio.Task[None]", player: Player, deadline: float) -> bool:
        """Wait a moment; False after the deadline. Raises KilnError for a request that failed."""
        await asyncio.sleep(_POLL)
        if users.done():
            users.result()
        failed = next((outcome for outcome in player.outcomes if outcome.error is not None), None)
        if failed is not None:
            raise KilnError(
                f"a request of {failed.planned_prompt} prompt and {failed.planned_output} output tokens "
                f"{failed.error}: {failed.message}"
            )
        return self._clock() < deadline

    def _sample(self, outcomes: Sequence[Outcome], batch: int, opened: float, closed: float) -> Sample:
        tokens = sum(_tokens_within(outcome, opened, closed) for outcome in outcomes)
        rate = tokens / (closed - opened) / self._mean_output
        whole = _whole(outcomes, batch, opened)
        gaps = [gap for outcome in whole for gap in outcome.gaps]
        good = sum(map(self._slo.met, whole)) / len(whole) if self._slo.limits else None
        return Sample(
            rate=rate,
            latency=batch / rate,  # Little's law: batch requests are always in flight
            first_token=float(np.percentile([outcome.first_token for outcome in whole], 99)),
            inter_token=float(np.percentile(gaps, 99)) if gaps else None,
            goodput=None if good is None else good * rate,
        )


def _enough(batch: int) -> int:
    return max(_LEAST_COMPLETIONS, batch)


def _all_decode(outcomes: Sequence[Outcome], batch: int) -> float | None:
    """When the last of the first `batch` requests had its first token; None before."""
    first = outcomes[:batch]
    if len(first) < batch or not all(outcome.deliveries for outcome in first):
        return None
    return max(outcome.deliveries[0] for outcome in first)


def _whole(outcomes: Sequence[Outcome], batch: int, opened: float) -> list[Outcome]:
    """Requests of full length that ended in the window."""
    return [outcome for outcome in outcomes[batch:] if outcome.answered and (outcome.end or 0.0) > opened]


def _tokens_within(outcome: Outcome, opened: float, closed: float) -> float:
    """Tokens delivered in (opened, closed]; several that came at once count by their mean number."""
    within = sum(opened < moment <= closed for moment in outcome.deliveries)
    if within == 0 or outcome.output_tokens is None:
        return within
    return within * outcome.output_tokens / len(outcome.deliveries)


def plain_sample(
    infer: Callable[[Mapping[str, NDArray]], object],
    feeds: Mapping[str, NDArray],
    batch: int,
    window: float,
    deadline: float,
    most_latency: float | None,
    clock: Callable[[], float] = time.perf_counter,
) -> Sample | None:
    """Calls one after the other for at least `window` seconds, after one that is not counted; None at the deadline.

    Goodput counts the items of calls within `most_latency`, of the time of all calls.
    """
    infer(feeds)
    times: list[float] = []
    while sum(times) < window or len(times) < _LEAST_COMPLETIONS:
        start = clock()
        if start >= deadline:
            return None
        infer(feeds)
        times.append(clock() - start)
    rate = batch * len(times) / sum(times)
    good = None if most_latency is None else sum(seconds <= most_latency for seconds in times) / len(times)
    return Sample(rate, sum(times) / len(times), goodput=None if good is None else good * rate)
