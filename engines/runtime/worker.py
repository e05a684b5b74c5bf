"""The thread that runs steps while there are requests.

It alone touches scheduler, cache account and backend. Other threads leave arrivals and cancellations, which it
takes between steps. Whatever happens, every accepted request gets exactly one outcome, and the blocks of one
that has its outcome are free while the engine is open.

With `overlap`, a step runs on a thread of its own while this one hands out what the step before gave: text,
log-probabilities, waking readers. What decides how to go on (the token, its end, a stop string) is never put off.

With `run_ahead` and a backend that samples by itself, the next step is launched while this one runs, as if every
sequence went on. The token that a sequence gets after its end is thrown away, and its blocks are free when the step
that made it has ended: at most two steps after its outcome. A step with an answer that takes logits on the host
(guidance, penalties, biases, log-probabilities, several answers to come) waits for those before it and runs alone.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from engines.backends.base import DecoderBackend, LaunchingBackend, StepInputs
from engines.runtime.answer import Answer, Outbox
from engines.runtime.batch import Batch, Chunk
from engines.runtime.in_flight import StepsInFlight
from engines.runtime.intake import Intake
from engines.runtime.kv_cache import KvCache
from engines.runtime.metrics import EngineMetrics
from engines.runtime.packing import step_inputs_from_batch
from engines.runtime.request import FinishReason
from engines.runtime.sampler import choose, require_token
from engines.runtime.scheduler import QueueFullError, Scheduler, SchedulerConfig
from engines.runtime.scheduler_metrics import expose_scheduler


class DecodeWorker:
    """Runs answers on a decoder backend, which it owns from now on, until `close`."""

    def __init__(self, backend: DecoderBackend, kv: KvCache, config: SchedulerConfig, metrics: EngineMetrics) -> None:
        self.backend = backend
        self.kv = kv
        self.scheduler = Scheduler(kv, config)
        self._metrics = metrics
        self._outbox = Outbox(metrics)
        self._broken: list[tuple[Answer, BaseException]] = []  # whose text could not be made
        self._active: dict[int, Answer] = {}  # worker thread only, like all above
        self._parents: dict[int, Answer] = {}  # of answers that are still in the `forks` of another
        self._flight = StepsInFlight(backend, self.scheduler) if isinstance(backend, LaunchingBackend) else None
        self._run_ahead = config.run_ahead and not config.speculate
        self._steps = ThreadPoolExecutor(1, "kiln-step") if config.overlap else None
        self._intake = Intake()
        expose_scheduler(metrics, self.scheduler, kv)
        self._thread = threading.Thread(target=self._run, name="kiln-decode", daemon=True)
        self._thread.start()

    @property
    def speculate(self) -> int:
        """Most tokens that an answer tries ahead."""
        return self.scheduler.config.speculate

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the worker by itself: nothing is answered any more."""
        return self._intake.failure

    def new_id(self) -> int:
        """An id for a sequence."""
        return self._intake.new_id()

    def submit(self, answer: Answer) -> None:
        """Queue an answer, with those in its `forks`.

        Raises KilnError when it can never fit, or the engine is closed or broken; QueueFullError when too many wait.
        """

        def check(arriving: int) -> None:
            self.kv.require_possible(answer.sequence)
            try:
                self.scheduler.require_room(arriving + len(answer.forks))
            except QueueFullError:
                self._metrics.finished("refused")
                raise

        self._intake.put(answer, check)

    def cancel(self, sequence_id: int) -> None:
        """Ask that an answer be ended before the next step."""
        self._intake.cancel(sequence_id)

    def close(self) -> None:
        """Cancel what is outstanding, end the thread and close the backend; returns when that is done."""
        self._intake.close()
        if threading.current_thread() is not self._thread:  # a finalizer may run on the worker itself
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._take_commands():
                now = time.monotonic()
                for sequence in self.scheduler.expired(now):
                    self._end_with_forks(self._active[sequence.id], reason="timeout")
                if self.scheduler.wait(now) > 0:
                    self._land(0)
                    continue
                self._draft()
                batch = self.scheduler.schedule(now)
                if batch is None:
                    self._land(0)
                elif self._flight is not None and self._run_ahead and not self._wants_logits(batch):
                    self._launch(self._flight, batch)
                else:
                    self._land(0)
                    self._step(tuple(chunk for chunk in batch if chunk.sequence.id in self._active))
        except BaseException as error:  # a bug of ours: nobody may wait for ever because of it
            self._intake.fail(error)
        finally:
            if self._flight is not None:
                self._flight.drop()
            self._end_all()
            if self._steps is not None:
                self._steps.shutdown()
            self.backend.close()

    def _take_commands(self) -> bool:
        """Wait until there is something to do, and take in what was left here; False when closing."""
        if not self.scheduler.has_work:
            self._deliver()  # no step comes that this could run beside
            self._end_broken()
            self._deliver()
        taken = self._intake.take(self._pause)
        if taken is None:
            return False
        for answer in taken[0]:
            self._start(answer)
        for sequence_id in taken[1]:
            self._cancel(sequence_id)
        return True

    def _start(self, answer: Answer) -> None:
        self._active[answer.sequence.id] = answer
        self._parents |= {fork.sequence.id: answer for fork in answer.forks}
        self.scheduler.submit(answer.sequence)
        self._metrics.prompt_tokens.inc(answer.sequence.prompt_length)

    def _cancel(self, sequence_id: int) -> None:
        """End one answer; those that were to begin with its next token begin by themselves."""
        if sequence_id in self._parents:
            parent = self._parents.pop(sequence_id)
            (fork,) = (fork for fork in parent.forks if fork.sequence.id == sequence_id)
            parent.forks.remove(fork)
            self._outbox.put(fork, reason="cancelled")
        elif sequence_id in self._active:  # else it was done before the cancellation came
            answer = self._active[sequence_id]
            heirs, answer.forks = answer.forks, []
            self._finish(answer, "cancelled")
            if heirs:
                first, *first.forks = heirs
                del self._parents[first.sequence.id]
                self._start(first)

    def _pause(self) -> float | None:
        """Seconds until there is something to do without a new command; None: for ever."""
        if self._flight:
            return 0.0
        if not self.scheduler.has_work:
            return None
        now = time.monotonic()
        due = [sequence.deadline - now for sequence in self.scheduler.waiting if sequence.deadline is not None]
        return max(0.0, min([self.scheduler.wait(now), *due]))

    def _draft(self) -> None:
        """Let every answer that decodes propose tokens for the next step."""
        if not self.speculate:
            return
        for sequence in self.scheduler.running:
            if sequence.decoding:
                sequence.draft = self._active[sequence.id].draft()

    def _wants_logits(self, batch: Batch) -> bool:
        return any(self._active[chunk.sequence.id].wants_logits for chunk in batch if chunk.rows)

    def _launch(self, flight: StepsInFlight, batch: Batch) -> None:
        """Launch one batch, if there is anything in it, and take what the step before it gave."""
        if batch:
            self._begin(batch)
            sampling = [self._active[chunk.sequence.id].row_sampling for chunk in batch if chunk.rows]
            try:
                flight.launch(batch, step_inputs_from_batch(batch, self.kv.block_size), sampling)
            except Exception as error:
                self._fail(batch, error)
        self._deliver()  # beside the steps
        self._land(1 if batch else 0)

    def _land(self, most: int) -> None:
        """Take what the oldest steps gave until only `most` are in flight."""
        while self._flight is not None and len(self._flight) > most:
            step = self._flight.land()
            now = time.monotonic()
            if step.error is not None:
                self._fail(step.batch, step.error)
            else:
                self._metrics.step_seconds.observe(step.seconds)
            for sequence, token in step.tokens:
                answer = self._active.get(sequence.id)
                if answer is None:
                    continue  # it ended while this step ran
                try:
                    require_token(token)
                    self._hand_out(answer, (token,), None, answer.accept(token), now)
                except Exception as error:
                    self._end_with_forks(answer, error=error)
            self.kv.verify()
            self._end_broken()

    def _begin(self, batch: Batch) -> None:
        """What comes before every step."""
        moves = self.kv.take_moves()
        if moves:
            self.backend.move_blocks(moves)  # an error here ends the engine: others than this batch's lose content
        now = time.monotonic()
        for chunk in batch:
            answer = self._active[chunk.sequence.id]
            if not answer.started:
                answer.started = True
                self._metrics.queue_seconds.observe(now - answer.sequence.arrival)
        self._metrics.batch_size.observe(len(batch))
        self._metrics.step_tokens.observe(sum(chunk.length for chunk in batch))

    def _fail(self, batch: Batch, error: Exception) -> None:
        for chunk in batch:
            if chunk.sequence.id in self._active:
                self._end_with_forks(self._active[chunk.sequence.id], error=error)

    def _step(self, batch: Batch) -> None:
        """Compute one batch; an error fails the requests in it and nobody else."""
        if not batch:
            return
        self._begin(batch)
        begun = time.monotonic()
        try:
            logits, best = self._compute(batch)
        except Exception as error:
            self._fail(batch, error)
            return
        now = time.monotonic()
        self._metrics.step_seconds.observe(now - begun)
        self.scheduler.observe(batch, now - begun)
        self.scheduler.advance(batch)
        row = 0
        for chunk in batch:
            if rows := chunk.rows:
                answer = self._active[chunk.sequence.id]
                try:
                    self._take_tokens(answer, chunk, logits[row : row + rows], best[row : row + rows], now)
                except Exception as error:
                    self._end_with_forks(answer, error=error)
                row += rows
        self.kv.verify()
        if self._steps is None:
            self._deliver()
        self._end_broken()

    def _compute(self, batch: Batch) -> tuple[NDArray[np.float32], NDArray[np.integer]]:
        """Logits of a batch, and the tokens that the step chose by them or, if it does not, the most likely ones.

        With overlap, what does not depend on them is done meanwhile.
        """
        inputs = step_inputs_from_batch(batch, self.kv.block_size)
        if self._steps is None:
            return self._run_step(batch, inputs)
        step = self._steps.submit(self._run_step, batch, inputs)
        try:
            self._deliver()
            for chunk in batch:
                guide = self._active[chunk.sequence.id].guide
                if guide is not None and chunk.rows:
                    guide.prepare()
        finally:
            wait([step])  # whatever happens here, no other step runs beside it
        return step.result()

    def _run_step(self, batch: Batch, inputs: StepInputs) -> tuple[NDArray[np.float32], NDArray[np.integer]]:
        if self._flight is None:
            logits = self.backend.step(inputs)
            return logits, np.argmax(logits, axis=-1) if len(logits) else np.empty(0, np.int64)
        sampling = [self._active[c.sequence.id].row_sampling for c in batch for _ in range(c.rows)]
        result = self._flight.compute(inputs, sampling)
        assert result.logits is not None
        return result.logits, result.tokens

    def _choose(self, row: NDArray[np.float32], given: int, answer: Answer) -> int:
        """A token from a row of logits, of which the step gave the most likely one, or its choice if it samples."""
        if self._flight is not None:
            require_token(given)
            if not answer.chosen_on_host:
                return given
        return choose(row, given, answer.sampling, answer.generator, answer.sequence, answer.guide)

    def _take_tokens(
        self, answer: Answer, chunk: Chunk, logits: NDArray[np.float32], best: NDArray[np.integer], now: float
    ) -> None:
        """Choose from rows of logits until one disagrees with the draft, or the answer ends."""
        sequence = answer.sequence
        forks, answer.forks = answer.forks, []
        for fork in forks:
            self._fork(answer, fork, logits[0], int(np.argmax(logits[0])), now)
        tokens: list[int] = []
        reason = None
        for row, given, drafted in zip_longest(logits, best.tolist(), chunk.draft):
            token = self._choose(row, given, answer)
            sequence.append(token)
            tokens.append(token)
            reason = answer.accept(token)
            if reason is not None or token != drafted:
                break
            self.scheduler.confirm(sequence)
        if chunk.draft:
            self._note_draft(answer, len(chunk.draft), len(tokens) - 1)
        self._hand_out(answer, tuple(tokens), logits[: len(tokens)], reason, now)

    def _fork(self, parent: Answer, fork: Answer, logits: NDArray[np.float32], most_likely: int, now: float) -> None:
        """Begin an answer with a choice of its own from its parent's logits."""
        del self._parents[fork.sequence.id]
        try:
            token = choose(logits, most_likely, fork.sampling, fork.generator, fork.sequence, fork.guide)
        except Exception as error:
            self._outbox.put(fork, error=error)
            return
        self._active[fork.sequence.id] = fork
        fork.started = True
        self.scheduler.fork(parent.sequence, fork.sequence, token)
        self._hand_out(fork, (token,), logits[None], fork.accept(token), now)

    def _hand_out(
        self,
        answer: Answer,
        tokens: tuple[int, ...],
        logits: NDArray[np.float32] | None,
        reason: FinishReason | None,
        now: float,
    ) -> None:
        self._metrics.handed_out(len(tokens), answer.sequence.arrival, answer.last_token, now)
        answer.last_token = now
        rows = () if logits is None or answer.sampling.logprobs is None else tuple(logits)
        if reason is not None:
            self._forget(answer)  # who sees the outcome sees the blocks free
        self._outbox.put(answer, tokens, text=answer.take_text(), rows=rows, reason=reason)

    def _note_draft(self, answer: Answer, drafted: int, accepted: int) -> None:
        assert answer.lookup is not None
        answer.lookup.record(len(answer.sequence.token_ids), drafted, accepted)
        self._metrics.drafted_tokens.inc(drafted)
        self._metrics.accepted_tokens.inc(accepted)

    def _finish(self, answer: Answer, reason: FinishReason) -> None:
        self._forget(answer)
        self._outbox.put(answer, reason=reason)

    def _end_with_forks(
        self, answer: Answer, *, reason: FinishReason | None = None, error: BaseException | None = None
    ) -> None:
        """End an answer, and those that were to begin with its next token."""
        self._forget(answer)
        for one in (answer, *answer.forks):
            self._parents.pop(one.sequence.id, None)
            self._outbox.put(one, reason=reason, error=error)

    def _forget(self, answer: Answer) -> None:
        del self._active[answer.sequence.id]
        self.scheduler.finish(answer.sequence)

    def _deliver(self) -> None:
        self._broken += self._outbox.deliver()

    def _end_broken(self) -> None:
        """Fail the answers whose text could not be made."""
        broken, self._broken = self._broken, []
        for answer, error in broken:
            if answer.sequence.id in self._active:
                self._end_with_forks(answer, error=error)
            elif not answer.stream.done:
                self._outbox.put(answer, error=error)

    def _end_all(self) -> None:
        """Give every answer that is left its outcome; nothing is accepted any more."""
        arrivals = self._intake.end()
        self._deliver()
        self._broken.clear()
        for answer in (*self._active.values(), *arrivals):
            for one in (answer, *answer.forks):
                if self.failure is not None:
                    self._outbox.put(one, error=self.failure)
                else:
                    self._outbox.put(one, reason="cancelled")
        for answer, error in self._outbox.deliver():
            answer.stream.fail(error)
