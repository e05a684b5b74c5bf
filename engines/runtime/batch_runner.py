"""One batch on a backend: joined where that is allowed, each request alone where it is not or where the batch fails.

One thread calls. Knows nothing of queues, lanes and futures.
"""

import time
from collections.abc import Sequence

from engines.backends.base import InferBackend
from engines.runtime.batch_check import BatchCheck, needs_padding
from engines.runtime.metrics import EngineMetrics
from engines.runtime.shape_buckets import Arrays, BatchLayout, Outputs, layout_from_tensors


class BatchRunner:
    """A backend, and what is known about how its model may be run."""

    def __init__(self, model: InferBackend, tolerance: float, metrics: EngineMetrics, name: str) -> None:
        self._model = model
        self._metrics = metrics
        self._check = BatchCheck(layout_from_tensors(model.inputs, model.outputs), tolerance, name)

    @property
    def layout(self) -> BatchLayout:
        """How requests may share a call; less than before once a check failed. Any thread may read."""
        return self._check.layout

    def run(self, requests: Sequence[Arrays], joined: Outputs | None = None) -> list[Outputs | Exception]:
        """Results or error of each request; `joined` are their merged inputs, if there already."""
        if len(requests) <= 1:
            return [self._alone(inputs) for inputs in requests]
        padded = needs_padding(requests)
        allowed, trusted = self._check.allows(padded), self._check.trusted(padded)
        together = self._together(requests, joined) if allowed else None
        if together is not None and trusted:
            return [*together]
        alone = [self._alone(inputs) for inputs in requests]
        results = [result for result in alone if not isinstance(result, Exception)]
        if allowed and not trusted and len(results) == len(alone):
            self._check.judge(requests, together, results, padded)
        return alone

    def _together(self, requests: Sequence[Arrays], joined: Outputs | None) -> list[Outputs] | None:
        """Each request's results from one call. None where that fails: run alone, most succeed and one says why."""
        layout = self._check.layout
        try:
            return layout.part(self._infer(joined or layout.merge(requests)), requests)
        except Exception:
            return None

    def _alone(self, inputs: Arrays) -> Outputs | Exception:
        try:
            return self._infer(inputs)
        except Exception as error:
            return error

    def _infer(self, inputs: Arrays) -> Outputs:
        start = time.perf_counter()
        outputs = self._model.infer(inputs)
        self._metrics.step_seconds.observe(time.perf_counter() - start)
        self._metrics.batch_size.observe(self._check.layout.rows(inputs) or 1)
        return outputs
