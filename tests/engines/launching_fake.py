"""FakeBackend as one that samples by itself: each step runs when it is launched, or not before it is collected."""

from collections import deque
from dataclasses import replace
from functools import partial

import numpy as np

from engines.backends.base import MOST_IN_FLIGHT, StepResult
from plugins.sampling import reference

from .conftest import FakeBackend


class LaunchingFake(FakeBackend):
    """Implements `LaunchingBackend`. `late` runs steps and moves only when somebody waits for them, in their order."""

    def __init__(self, late: bool = True, **options) -> None:
        super().__init__(**options)
        self.late = late
        self.queue = deque()
        self.results = deque()  # of steps that have run
        self.previous = np.full(1, -1, np.int32)
        self.in_flight = 0
        self.most_in_flight = 0
        self.fed = 0
        self.with_logits = 0
        self.fail_launches: list[Exception] = []

    def launch(self, inputs, sampling, feed, *, logits):
        if self.fail_launches:
            raise self.fail_launches.pop()
        assert self.in_flight < MOST_IN_FLIGHT
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.fed += int((feed >= 0).sum())
        self.with_logits += logits
        self.queue.append(partial(self._run, inputs, sampling, feed, logits))
        if not self.late:
            self._catch_up()

    def collect(self) -> StepResult:
        while not self.results:
            self.queue.popleft()()
        self.in_flight -= 1
        result = self.results.popleft()
        if isinstance(result, Exception):
            raise result
        return result

    def move_blocks(self, moves) -> None:
        self.queue.append(partial(super().move_blocks, moves))
        if not self.late:
            self._catch_up()

    def _catch_up(self):
        while self.queue:
            self.queue.popleft()()

    def _run(self, inputs, sampling, feed, logits):
        try:
            ids = reference.feed_tokens(inputs.input_ids, feed, self.previous)
            found = self.step(replace(inputs, input_ids=ids))
        except Exception as error:
            self.previous = np.full(100, 7, np.int32)  # some token
            self.results.append(error)
            return
        how = (getattr(sampling, name) for name in sampling.__dataclass_fields__)
        self.previous = reference.sample(found, *how)
        self.results.append(StepResult(self.previous, found if logits else None))
