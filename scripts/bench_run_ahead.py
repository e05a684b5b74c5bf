"""What the host costs a step of a whole engine that runs ahead, on a device that only takes its time.

The device is a thread that holds every launched step for `--step` milliseconds and notes how long it had nothing to do
between two steps: that is the host's cost which is not hidden. With 0 ms the host is never waited for, so a step's
time is all that the host does for it: schedule, pack, launch, take tokens, hand them out. Greedy and sampled requests
without text; the floor is a loop in Python that appends a token to each sequence. A table, then one JSON line.

    python scripts/bench_run_ahead.py [--steps N] [--step MS]
"""

import argparse
import json
import queue
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engines.backends.base import Int32Array, SamplingInputs, StepInputs, StepResult
from engines.runtime.engine import Engine
from engines.runtime.request import Request, SamplingParams
from engines.runtime.scheduler import SchedulerConfig
from passes.onnx_model import DecoderSpec
from plugins.paged_attention.schema import KvLayer, KvSpec

RUNNING = (1, 16, 64, 128, 256)
PROMPT = 40
BLOCK_SIZE = 16


class TimedDevice:
    """Takes `seconds` for a step and computes nothing. Implements `LaunchingBackend`."""

    host_blocks = 0

    def __init__(self, num_blocks: int, seconds: float) -> None:
        self.kv = KvSpec((KvLayer(1, 1),), BLOCK_SIZE, "float32")
        self.num_blocks = num_blocks
        self.seconds = seconds
        self.steps: list[tuple[int, float, float]] = []  # tokens, start and end of each
        self._queue: queue.SimpleQueue[tuple[StepInputs, Future[StepResult]] | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[Future[StepResult]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def launch(self, inputs: StepInputs, sampling: SamplingInputs, feed: Int32Array, *, logits: bool) -> None:
        assert not logits
        future: Future[StepResult] = Future()
        self._launched.put(future)
        self._queue.put((inputs, future))

    def collect(self) -> StepResult:
        return self._launched.get().result()

    def step(self, inputs: StepInputs) -> np.ndarray:
        raise AssertionError("every request here samples on the device")

    def move_blocks(self, moves: Sequence[tuple[int, int]]) -> None:
        raise AssertionError("the cache holds everybody")

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            inputs, future = item
            start = time.perf_counter()
            if self.seconds:
                time.sleep(self.seconds)
            self.steps.append((len(inputs.input_ids), start, time.perf_counter()))
            future.set_result(StepResult(np.full(len(inputs.logits_indices), 5, np.int32), None))


def measure(running: int, steps: int, seconds: float, sampling: SamplingParams) -> dict[str, float]:
    """Median microseconds between the ends of two decode steps, and of the device's idleness between them."""
    device = TimedDevice(running * ((PROMPT + steps) // BLOCK_SIZE + 2), seconds)
    config = SchedulerConfig(running, max(2048, running * PROMPT), headroom=0.0, step_stretch=None)
    with Engine.from_decoder(device, DecoderSpec(device.kv, 1000, PROMPT + steps + 1, (1,)), config=config) as engine:
        requests = [Request((number % 900 + 2, *range(2, PROMPT + 1)), sampling) for number in range(running)]
        for stream in [engine.submit(request) for request in requests]:
            stream.result()
    full = [
        (before, after)
        for before, after in zip(device.steps, device.steps[1:], strict=False)
        if before[0] == after[0] == running
    ]
    full = full[len(full) // 4 :]  # caches and allocators are warm then
    return {
        "step": statistics.median(after[2] - before[2] for before, after in full) * 1e6,
        "idle": statistics.median(after[1] - before[2] for before, after in full) * 1e6,
    }


def floor(running: int, steps: int) -> float:
    """Microseconds of a loop that appends a token to each sequence."""
    sequences: list[list[int]] = [[] for _ in range(running)]
    start = time.perf_counter()
    for _ in range(steps):
        for sequence in sequences:
            sequence.append(1)
    return (time.perf_counter() - start) / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step", type=float, default=6.0, help="milliseconds that the device takes")
    arguments = parser.parse_args()
    kinds = {
        "greedy": SamplingParams(max_tokens=arguments.steps),
        "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=arguments.steps),
    }
    idleness = f"device idle, us, of a step of {arguments.step} ms"
    print(f"{'running':>8}{'':>9}{'host, us':>10}{idleness:>42}{'floor':>8}")
    results: dict[str, dict[int, dict[str, float]]] = {kind: {} for kind in kinds}
    for kind, sampling in kinds.items():
        for running in RUNNING:
            host = measure(running, arguments.steps, 0.0, sampling)["step"]
            idle = measure(running, arguments.steps, arguments.step / 1e3, sampling)["idle"]
            results[kind][running] = {"host": host, "idle": idle, "floor": floor(running, arguments.steps)}
            print(f"{running:>8}{kind:>9}{host:>10.0f}{idle:>42.0f}{results[kind][running]['floor']:>8.1f}", flush=True)
    print(json.dumps({"step_ms": arguments.step, "microseconds": results}))


if __name__ == "__main__":
    main()
