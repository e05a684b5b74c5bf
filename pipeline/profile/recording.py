"""Backends that note when each step ran and what it did, around the real ones; and requests that make such steps.

Knows nothing of operators.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from engines.backends.base import (
    DecoderBackend,
    InferBackend,
    Int32Array,
    LaunchingBackend,
    SamplingInputs,
    StepInputs,
    StepResult,
)
from engines.runtime.engine import Engine
from engines.runtime.request import Request, SamplingParams
from pipeline.operator_work import SequenceStep
from plugins.errors import KilnError


@dataclass(frozen=True)
class Launch:
    """What a step was launched with, beside its inputs."""

    sampling: SamplingInputs
    feed: Int32Array
    logits: bool


@dataclass(frozen=True)
class Step:
    """One call of a backend, in seconds of `time.perf_counter`. `number` counts the backend's calls from 0.

    A launched step ends when it was collected; others may have been under way meanwhile.
    """

    number: int
    start: float
    end: float
    sequences: tuple[SequenceStep, ...] = ()
    inputs: StepInputs | None = None
    launch: Launch | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def decodes(self) -> bool:
        """One token of each sequence, after others."""
        return all(sequence.new == 1 and sequence.past > 0 for sequence in self.sequences)


@dataclass(frozen=True)
class Pass:
    """One prompt, one decode step or one call: its steps, and the seconds in which a caller saw it happen."""

    steps: tuple[Step, ...]
    seconds: float

    @property
    def in_backend(self) -> float:
        return sum(step.seconds for step in self.steps)


@dataclass
class RecordingDecoder:
    """Implements `DecoderBackend` over another one."""

    backend: DecoderBackend
    steps: list[Step] = field(default_factory=list)
    _open: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._open.set()
        self.kv = self.backend.kv
        self.num_blocks = self.backend.num_blocks
        self.host_blocks = self.backend.host_blocks

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Let no step begin meanwhile, so that requests which are made then run together."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        self._open.wait()
        start = time.perf_counter()
        logits = self.backend.step(inputs)
        self._note(start, inputs)
        return logits

    def _note(self, start: float, inputs: StepInputs, launch: Launch | None = None) -> None:
        end = time.perf_counter()
        new = np.diff(inputs.cumulative_sequence_length).tolist()
        sequences = tuple(map(SequenceStep, new, inputs.past_seqlens.tolist()))
        self.steps.append(Step(len(self.steps), start, end, sequences, inputs, launch))

    def move_blocks(self, moves: Sequence[tuple[int, int]]) -> None:
        self.backend.move_blocks(moves)

    def close(self) -> None:
        """Does nothing: who made the backend reads its profile first."""


@dataclass
class RecordingLauncher(RecordingDecoder):
    """Implements `LaunchingBackend` over another one, so that an engine runs ahead as it does when it serves."""

    backend: LaunchingBackend
    _launched: deque[tuple[float, StepInputs, Launch]] = field(default_factory=deque)

    def launch(self, inputs: StepInputs, sampling: SamplingInputs, feed: Int32Array, *, logits: bool) -> None:
        self._open.wait()
        start = time.perf_counter()
        self.backend.launch(inputs, sampling, feed, logits=logits)
        self._launched.append((start, inputs, Launch(sampling, feed, logits)))

    def collect(self) -> StepResult:
        start, inputs, launch = self._launched.popleft()
        result = self.backend.collect()
        self._note(start, inputs, launch)
        return result


def recorder_of_decoder(backend: DecoderBackend) -> RecordingDecoder:
    """One that can do what the backend can."""
    return RecordingLauncher(backend) if isinstance(backend, LaunchingBackend) else RecordingDecoder(backend)


def run_again(backend: DecoderBackend, step: Step) -> None:
    """A recorded step, to its end, on a backend of the same kind; it writes to the same places of the cache."""
    if step.launch is None:
        assert step.inputs is not None
        backend.step(step.inputs)
    else:
        assert isinstance(backend, LaunchingBackend)
        launch_again(backend, step)
        backend.collect()


def launch_again(backend: LaunchingBackend, step: Step) -> None:
    """A step that was recorded when it was launched; it must be collected."""
    assert step.inputs is not None
    assert step.launch is not None
    backend.launch(step.inputs, step.launch.sampling, step.launch.feed, logits=step.launch.logits)


@dataclass
class RecordingModel:
    """Implements `InferBackend` over another one."""

    backend: InferBackend
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inputs = self.backend.inputs
        self.outputs = self.backend.outputs

    def check(self, inputs: Mapping[str, NDArray]) -> None:
        self.backend.check(inputs)

    def infer(self, inputs: Mapping[str, NDArray]) -> dict[str, NDArray]:
        start = time.perf_counter()
        outputs = self.backend.infer(inputs)
        self.steps.append(Step(len(self.steps), start, time.perf_counter()))
        return outputs

    def close(self) -> None:
        """Does nothing, as above."""


def prefill_passes(engine: Engine, recorder: RecordingDecoder, prompts: Sequence[tuple[int, ...]]) -> list[Pass]:
    """Each prompt by itself, from submitting it to its first token; the first one warms up and is left out."""
    passes = []
    for prompt in prompts:
        first = len(recorder.steps)
        start = time.perf_counter()
        next(stream := engine.submit(Request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))))
        seconds = time.perf_counter() - start
        stream.result()
        passes.append(Pass(tuple(recorder.steps[first:]), seconds))
    return passes[1:]


def decode_passes(
    engine: Engine, recorder: RecordingDecoder, prompts: Sequence[tuple[int, ...]], tokens: int
) -> list[Pass]:
    """Steps in which all prompts decode, each from the end of the one before to its own.

    The last launched step is left out: nothing is launched while it runs, so that the host takes less than it does.
    """
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    first = len(recorder.steps)
    with recorder.holding():
        streams = [engine.submit(Request(prompt, sampling)) for prompt in prompts]
    for stream in streams:
        stream.result()
    steps = recorder.steps[first:]
    if steps[-1].launch is not None:
        steps.pop()
    passes = [
        Pass((step,), step.end - before.end)
        for before, step in pairwise(steps)
        if len(before.sequences) == len(step.sequences) == len(prompts) and before.decodes and step.decodes
    ]
    if len(passes) < 2:
        raise KilnError(
            f"{len(prompts)} sequences never decoded together for 3 of {tokens} tokens; profile with more --tokens"
        )
    return passes[1:]


def call_passes(engine: Engine, recorder: RecordingModel, feeds: Mapping[str, NDArray], repetitions: int) -> list[Pass]:
    """Calls one after the other, from the request to its outputs; the first one warms up and is left out."""
    passes = []
    for _ in range(repetitions + 1):
        first = len(recorder.steps)
        start = time.perf_counter()
        engine.infer(feeds)
        passes.append(Pass(tuple(recorder.steps[first:]), time.perf_counter() - start))
    return passes[1:]
