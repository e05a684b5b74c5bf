"""The thread that runs steps while there are requests.

It alone touches scheduler, block pool and backend. Other threads leave arrivals and cancellations, which it
takes between steps. Whatever happens, every accepted request gets exactly one outcome, and the blocks of one
that has its outcome are free while the engine is open.
"""

import threading
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.backends.base import DecoderBackend
from engines.runtime.block_pool import BlockPool
from engines.runtime.metrics import EngineMetrics
from engines.runtime.packing import step_inputs_from_batch
from engines.runtime.prefix_cache import salt_of_tenant
from engines.runtime.request import FinishReason, Request, SamplingParams, TokenChunk, TokenLogprobs
from engines.runtime.sampler import NonFiniteLogitsError, generator_from_seed, logprobs_of, sample_rows
from engines.runtime.scheduler import Batch, Scheduler, SchedulerConfig
from engines.runtime.sequence import Sequence
from engines.runtime.stream import Stream
from engines.runtime.tokenizer import TextStream, Tokenizer
from plugins.errors import KilnError


@dataclass(frozen=True)
class _Active:
    """One accepted request: its place in the schedule and where its tokens go."""

    sequence: Sequence
    sampling: SamplingParams
    generator: np.random.Generator
    text: TextStream | None
    stream: Stream


class DecodeWorker:
    """Runs requests on a decoder backend, which it owns from now on, until `close`."""

    def __init__(
        self, backend: DecoderBackend, eos_token_ids: tuple[int, ...], config: SchedulerConfig, metrics: EngineMetrics
    ) -> None:
        self.backend = backend
        self._metrics = metrics
        self.pool = BlockPool(backend.num_blocks)
        self._scheduler = Scheduler(self.pool, backend.kv.block_size, config)
        self._eos = frozenset(eos_token_ids)
        self._active: dict[int, _Active] = {}  # worker thread only
        self._changed = threading.Condition()  # guards what follows
        self._arrivals: list[_Active] = []
        self._cancelled: list[int] = []
        self._next_id = 0
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kiln-decode", daemon=True)
        self._thread.start()

    def submit(
        self, prompt: list[int], max_tokens: int, request: Request, tokenizer: Tokenizer | None = None
    ) -> list[Stream]:
        """Queue a request.

        Raises KilnError when it can never fit, or the engine is closed or broken; QueueFullError when too many wait.
        """
        now = time.monotonic()
        with self._changed:
            if self._failure is not None:
                raise KilnError(f"the engine has stopped: {self._failure!r}; open it again") from self._failure
            if self._closing:
                raise KilnError("the engine is closed; open it again")
            sequence = Sequence(
                self._next_id,
                prompt,
                max_tokens,
                lane=request.lane,
                arrival=now,
                deadline=None if request.timeout is None else now + request.timeout,
                salt=salt_of_tenant(request.tenant),
            )
            self._scheduler.require_possible(sequence)
            self._scheduler.require_room(len(self._arrivals))
            stream = Stream(len(prompt), lambda: self._cancel(sequence.id))
            sampling = request.sampling
            text = None if tokenizer is None else tokenizer.text_stream(prompt, sampling.stop)
            self._arrivals.append(_Active(sequence, sampling, generator_from_seed(sampling.seed), text, stream))
            self._next_id += 1
            self._changed.notify()
        return [stream]

    def close(self) -> None:
        """Cancel what is outstanding, end the thread and close the backend; returns when that is done."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:  # a finalizer may run on the worker itself
            self._thread.join()

    def _cancel(self, sequence_id: int) -> None:
        with self._changed:
            self._cancelled.append(sequence_id)
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._take_commands():
                now = time.monotonic()
                for sequence in self._scheduler.expired(now):
                    self._finish(self._active[sequence.id], (), "", "timeout")
                if self._scheduler.wait(now) > 0:
                    continue
                batch = self._scheduler.schedule(now)
                if batch:
                    self._step(batch)
        except BaseException as error:  # a bug of ours: nobody may wait for ever because of it
            with self._changed:
                self._failure = error
        finally:
            self._end_all()
            self.backend.close()

    def _take_commands(self) -> bool:
        """Wait until there is something to do, and take in what was left here; False when closing."""
        with self._changed:
            while not (self._closing or self._arrivals or self._cancelled):
                pause = self._pause()
                if pause == 0:
                    break
                self._changed.wait(pause)
            if self._closing:
                return False
            arrivals, self._arrivals = self._arrivals, []
            cancelled, self._cancelled = self._cancelled, []
        self._active |= {active.sequence.id: active for active in arrivals}
        for active in arrivals:
            self._scheduler.submit(active.sequence)
        for sequence_id in cancelled:
            if sequence_id in self._active:  # else it was done before the cancellation came
                self._finish(self._active[sequence_id], (), "", "cancelled")
        return True

    def _pause(self) -> float | None:
        """Seconds until there is something to do without a new command; None: for ever."""
        if not self._scheduler.has_work:
            return None
        now = time.monotonic()
        due = [sequence.deadline - now for sequence in self._scheduler.waiting if sequence.deadline is not None]
        return max(0.0, min([self._scheduler.wait(now), *due]))

    def _step(self, batch: Batch) -> None:
        """Compute one batch; an error fails the requests in it and nobody else."""
        try:
            logits = self.backend.step(step_inputs_from_batch(batch, self.backend.kv.block_size))
            self._scheduler.advance(batch)
            sampling = [self._active[chunk.sequence.id] for chunk in batch if chunk.samples]
            tokens = sample_rows(
                logits,
                [a.sampling for a in sampling],
                [a.generator for a in sampling],
                [a.sequence for a in sampling],
            )
        except Exception as error:
            for chunk in batch:
                self._fail(self._active[chunk.sequence.id], error)
            return
        for active, token, row in zip(sampling, tokens, logits, strict=True):
            try:
                self._accept(active, token, row)
            except Exception as error:
                self._fail(active, error)

    def _accept(self, active: _Active, token: int | NonFiniteLogitsError, logits: NDArray[np.float32]) -> None:
        """Add a sampled token to a request, and end the request if it is the last."""
        if isinstance(token, NonFiniteLogitsError):
            raise token
        wanted = active.sampling.logprobs
        logprobs = () if wanted is None else (logprobs_of(logits, token, wanted),)
        active.sequence.append(token)
        ended = token in self._eos and not active.sampling.ignore_eos
        text = "" if ended or active.text is None else active.text.push(token)
        if ended or (active.text is not None and active.text.stopped):
            self._finish(active, (token,), text, "stop", logprobs)
        elif active.sequence.used_up:
            self._finish(active, (token,), text, "length", logprobs)
        else:
            active.stream.push(TokenChunk((token,), text, None, logprobs))

    def _finish(
        self,
        active: _Active,
        tokens: tuple[int, ...],
        text: str,
        reason: FinishReason,
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        """Free a request's blocks, then tell its reader: who sees the outcome sees the blocks free."""
        self._forget(active)
        if active.text is not None:
            text += active.text.finish()
        active.stream.push(TokenChunk(tokens, text, reason, logprobs))

    def _fail(self, active: _Active, error: BaseException) -> None:
        self._forget(active)
        active.stream.fail(error)

    def _forget(self, active: _Active) -> None:
        del self._active[active.sequence.id]
        self._scheduler.finish(active.sequence)

    def _end_all(self) -> None:
        """Give every request that is left its outcome; nothing is accepted any more."""
        with self._changed:
            self._closing = True
            left = [*self._active.values(), *self._arrivals]
            self._arrivals = []
        for active in left:
            if active.stream.done:
                continue
            if self._failure is not None:
                active.stream.fail(self._failure)
            else:
                active.stream.push(TokenChunk((), active.text.finish() if active.text else "", "cancelled"))
