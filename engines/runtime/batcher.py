"""The threads that run a model without a KV cache in batches of the requests that wait.

One thread alone calls the backend: it takes the next batch, computes, and hands out results. While it computes, a
second one joins the arrays of the next batch if that is full already, and ends requests whose deadline comes. Whatever
happens, every accepted request gets exactly one outcome. Which requests make a batch is decided in `batch_queue`, how
one is computed in `batch_runner`.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from heapq import heappop, heappush

from engines.backends.base import InferBackend
from engines.runtime.batch_queue import BatchingConfig, BatchQueue, Waiting
from engines.runtime.batch_runner import BatchRunner
from engines.runtime.metrics import EngineMetrics
from engines.runtime.scheduler import QueueFullError
from engines.runtime.sequence import Lane
from engines.runtime.shape_buckets import Arrays, Outputs
from plugins.errors import KilnError


@dataclass(frozen=True, eq=False)
class _Request:
    """One accepted request: its place in the queue, its arrays, and who waits for it."""

    place: Waiting
    inputs: Arrays
    future: "Future[Outputs]"


@dataclass(frozen=True)
class _Joined:
    """A batch that may be the next, and its arrays; without arrays if joining them failed."""

    places: tuple[Waiting, ...]
    inputs: Outputs | None


class BatchWorker:
    """Runs requests on a backend, which it owns from now on, until `close`."""

    def __init__(self, model: InferBackend, config: BatchingConfig, metrics: EngineMetrics, name: str) -> None:
        self._model = model
        self._config = config
        self._metrics = metrics
        self._runner = BatchRunner(model, config.tolerance, metrics, name)
        self._lock = threading.Lock()  # guards what follows; never held while a future is resolved: that runs callbacks
        self._work = threading.Condition(self._lock)  # the thread that computes waits here,
        self._ahead = threading.Condition(self._lock)  # the one that looks ahead here
        self._queue = BatchQueue(config)
        self._requests: dict[int, _Request] = {}  # those without an outcome, waiting or running
        self._deadlines: list[tuple[float, int]] = []  # a heap; some of these requests have their outcome
        self._joined: _Joined | None = None
        self._computing = False
        self._next_number = 0
        self._closing = False
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._guard, args=(loop,), name=name, daemon=True)
            for loop, name in ((self._run, "kiln-infer"), (self._look_ahead, "kiln-infer-ahead"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the worker by itself: nothing is answered any more."""
        return self._failure

    def submit(self, inputs: Arrays, lane: Lane, timeout: float | None) -> "Future[Outputs]":
        """Queue a request; its arrays must stay as they are until the future is done.

        Raises KilnError on wrong inputs or when the engine is closed or broken; QueueFullError when too many wait.
        """
        self._model.check(inputs)
        future: Future[Outputs] = Future()
        with self._lock:
            if self._failure is not None:
                raise self._stopped()
            if self._closing:
                raise KilnError("the engine is closed; open it again")
            try:
                self._queue.require_room()
            except QueueFullError:
                self._metrics.finished("refused")
                raise
            request = _Request(self._place(inputs, lane, timeout), dict(inputs), future)
            self._add(request)
        future.add_done_callback(lambda done: self._withdraw(request) if done.cancelled() else None)
        return future

    def close(self) -> None:
        """End requests that wait, let the batch that runs finish, and close the backend; returns when that is done."""
        self._stop(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # a callback or a finalizer may run on one of them
                thread.join()

    def _place(self, inputs: Arrays, lane: Lane, timeout: float | None) -> Waiting:
        now = time.monotonic()
        layout, config = self._runner.layout, self._config
        deadline = None if timeout is None else now + timeout
        rows = layout.rows(inputs)
        if rows is None:
            return Waiting(self._next_number, None, 1, 1, lane, now, deadline)
        key, length = layout.key(inputs, config.buckets)
        limit = config.max_batch if length is None else min(config.max_batch, max(1, config.tokens_per_batch // length))
        return Waiting(self._next_number, key, rows, limit, lane, now, deadline)

    def _add(self, request: _Request) -> None:
        place = request.place
        self._next_number += 1
        self._requests[place.number] = request
        self._queue.add(place)
        self._work.notify()
        if place.deadline is not None:
            if len(self._deadlines) > 2 * len(self._requests) + 64:
                self._deadlines = sorted(entry for entry in self._deadlines if entry[1] in self._requests)
            heappush(self._deadlines, (place.deadline, place.number))
        first_deadline = self._deadlines and self._deadlines[0][1] == place.number
        if first_deadline or (self._computing and self._queue.rows >= place.limit):
            self._ahead.notify()

    def _withdraw(self, request: _Request) -> None:
        """A future was cancelled, which is possible only before its request runs."""
        with self._lock:
            mine = self._requests.pop(request.place.number, None) is not None
            if mine:
                self._queue.remove(request.place)
        if mine:
            self._settle(request, "cancelled", None)

    def _guard(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:  # a bug of ours: nobody may wait for ever because of it
            self._stop(error)
        if threading.current_thread() is self._threads[0]:
            self._end_all()
            self._model.close()

    def _stop(self, failure: BaseException | None) -> None:
        with self._lock:
            self._closing = True
            self._failure = self._failure or failure
            self._work.notify()
            self._ahead.notify()

    def _stopped(self) -> KilnError:
        error = KilnError(f"the engine has stopped: {self._failure!r}; open it again")
        error.__cause__ = self._failure
        return error

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            batch, joined = taken
            outcomes = self._runner.run([request.inputs for request in batch], joined)
            with self._lock:
                self._computing = False
                self._queue.ended(time.monotonic())
                left = [self._requests.pop(request.place.number, None) is not None for request in batch]
            for request, outcome, mine in zip(batch, outcomes, left, strict=True):
                if mine:  # else its deadline came
                    self._settle(request, "error" if isinstance(outcome, Exception) else "done", outcome)

    def _take(self) -> tuple[list[_Request], Outputs | None] | None:
        """Wait for the next batch and start it: its requests, and their arrays if they are joined. None: closing."""
        while True:
            with self._lock:
                if self._closing:
                    return None
                now = time.monotonic()
                late = self._late(now)
                due = self._queue.due(now)
                if not late and due is not None and due <= now:
                    batch, joined = self._start(now)
                    break
                if not late:
                    self._work.wait(None if due is None else min([due, *self._next_deadline()]) - now)
            self._time_out(late)
        for request in batch:
            self._metrics.queue_seconds.observe(now - request.place.arrival)
        return batch, joined

    def _start(self, now: float) -> tuple[list[_Request], Outputs | None]:
        """Take the next batch out of the queue, without those that were cancelled a moment ago."""
        places = self._queue.select(now)
        self._queue.take(places)
        joined, self._joined = self._joined, None
        requests = [self._requests[place.number] for place in places]
        batch = [request for request in requests if request.future.set_running_or_notify_cancel()]
        for request in set(requests) - set(batch):
            del self._requests[request.place.number]
            self._metrics.finished("cancelled")
        self._computing = True
        if self._deadlines or len(self._queue):
            self._ahead.notify()
        usable = joined is not None and joined.places == places and len(batch) == len(places)
        return batch, joined.inputs if joined is not None and usable else None

    def _look_ahead(self) -> None:
        while True:
            with self._lock:
                if self._closing:
                    return
                now = time.monotonic()
                late = self._late(now)
                places = () if late else self._full_batch(now)
                if not late and not places:
                    self._ahead.wait(min((due - now for due in self._next_deadline()), default=None))
                requests = [self._requests[place.number] for place in places]
            self._time_out(late)
            if requests:
                joined = _Joined(places, self._join([request.inputs for request in requests]))
                with self._lock:
                    if self._computing and all(place.number in self._queue for place in places):
                        self._joined = joined

    def _full_batch(self, now: float) -> tuple[Waiting, ...]:
        """The next batch, if it is not joined yet, another one runs, and nobody else could join this one."""
        if not self._computing or self._joined is not None:
            return ()
        places = self._queue.select(now)
        rows = sum(place.rows for place in places)
        return places if len(places) > 1 and rows + places[-1].rows > places[0].limit else ()

    def _join(self, requests: list[Arrays]) -> Outputs | None:
        try:
            return self._runner.layout.merge(requests)
        except Exception:  # such as too little memory: the thread that computes will run each alone
            return None

    def _next_deadline(self) -> list[float]:
        return [self._deadlines[0][0]] if self._deadlines else []

    def _late(self, now: float) -> list[_Request]:
        """Take out the requests whose deadline has come, waiting or running."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self._requests.pop(heappop(self._deadlines)[1], None)
            if request is not None:
                late.append(request)
                if request.place.number in self._queue:
                    self._queue.remove(request.place)
        return late

    def _time_out(self, late: list[_Request]) -> None:
        for request in late:
            limit = (request.place.deadline or 0) - request.place.arrival
            error = TimeoutError(
                f"the request is not done after {limit:g} s; try again later, or give it a longer timeout"
            )
            self._settle(request, "timeout", error)

    def _settle(self, request: _Request, reason: str, outcome: Outputs | Exception | None) -> None:
        """Give a request its outcome; for the one thread that took it out of `_requests`."""
        future = request.future
        if not future.running() and not future.set_running_or_notify_cancel():
            reason, outcome = "cancelled", None
        self._metrics.finished(reason)
        self._metrics.request_seconds.observe(time.monotonic() - request.place.arrival)
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        elif outcome is not None:
            future.set_result(outcome)

    def _end_all(self) -> None:
        """Give every request that is left its outcome; nothing is accepted any more."""
        with self._lock:
            self._closing = True
            left = list(self._requests.values())
            self._requests.clear()
            self._queue = BatchQueue(self._config)
        for request in left:
            if self._failure is not None:
                self._settle(request, "error", self._stopped())
            else:
                self._settle(request, "cancelled", KilnError("the engine was closed before the request ran"))
