"""How `kiln tune` measures a batch: a target in lockstep with the event loop, and a clock that is turned by hand."""

import asyncio
from collections.abc import Callable

import pytest

from pipeline.load_test.report import Slo
from pipeline.load_test.targets import LoadError, LoadRequest, Usage
from pipeline.tune.measure import DecoderMeasure, plain_sample
from plugins.errors import KilnError
from tests.pipeline.tune_material import TRACE


class Lockstep:
    """A target that gives a token to every request in flight each time the event loop comes round."""

    name, vocabulary = "lockstep", 50

    def __init__(self, fail_at: int | None = None) -> None:
        self.requests: list[LoadRequest] = []
        self.running = self.most = 0
        self._fail_at = fail_at

    async def answer(self, request: LoadRequest, deliver: Callable[[], None]) -> Usage:
        self.requests.append(request)
        if len(self.requests) == self._fail_at:
            raise LoadError("refused", "too long")
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(request.output_tokens):
                await asyncio.sleep(0.001)
                deliver()
        finally:
            self.running -= 1
        return Usage(len(request.prompt), request.output_tokens)

    async def close(self) -> None:
        pass


def test_a_measurement_keeps_a_batch_in_flight_and_counts_its_tokens() -> None:
    target = Lockstep()
    measure = DecoderMeasure(TRACE, Slo(first_token=60.0), seed=0)
    sample = measure(target, 4, window=0.05, deadline=float("inf"))
    assert sample is not None
    assert target.most == 4
    assert target.running == 0  # what was in flight is ended
    assert [request.output_tokens for request in target.requests[:6]] == [2, 4, 6, 8, 8, 8]
    assert sample.latency * sample.rate == pytest.approx(4)
    assert sample.goodput == pytest.approx(sample.rate)
    assert sample.first_token is not None
    assert sample.inter_token is not None
    assert 0 < sample.first_token < sample.latency
    before = {request.prompt for request in target.requests}
    assert len(before) == len(target.requests)
    measure(target, 4, window=0.0, deadline=float("inf"))
    assert len({request.prompt for request in target.requests}) == len(target.requests)  # nothing known from before


def test_a_measurement_ends_at_its_deadline_and_at_an_error() -> None:
    measure = DecoderMeasure(TRACE, Slo(), seed=0)
    assert measure(Lockstep(), 2, window=60.0, deadline=0.0) is None
    with pytest.raises(KilnError, match="20 prompt and 8 output tokens refused: too long"):
        measure(Lockstep(fail_at=3), 2, window=60.0, deadline=float("inf"))


def test_plain_batches_are_timed_by_the_clock() -> None:
    now = [0.0]
    durations = iter([9.0, 0.5, 1.0, 0.5])  # the first one is not counted

    def infer(feeds: object) -> None:
        now[0] += next(durations)

    sample = plain_sample(infer, {}, 8, window=2.0, deadline=100.0, most_latency=0.6, clock=lambda: now[0])
    assert sample is not None
    assert sample.rate == pytest.approx(8 * 3 / 2.0)
    assert sample.latency == pytest.approx(2.0 / 3)
    assert sample.goodput == pytest.approx(sample.rate * 2 / 3)
    assert plain_sample(lambda feeds: None, {}, 8, 2.0, 100.0, None, clock=lambda: 100.0) is None
