"""What dynamic batching gives callers who send one text or one image at a time: a table, then one JSON line.

Each client is a thread that sends its next request when it has the answer to the last. Texts are token ids of lengths
that vary as short texts do (lognormal, median 12 tokens, 3 to 64), images are noise; seeds are fixed. The modes take
turns in every round, so that a change of the machine's load meets all of them; figures are medians over the rounds.

    python scripts/bench_batching.py minilm=BUNDLE efficientnet=BUNDLE [--seconds 3] [--rounds 3]
"""

import argparse
import json
import statistics
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engines.runtime.batch_queue import BatchingConfig
from engines.runtime.engine import Engine
from engines.runtime.info import TensorInfo

CLIENTS = (1, 4, 16)
MODES = {
    "off": BatchingConfig(max_batch=1),
    "on, no wait": BatchingConfig(max_wait=0.0),
    "on": BatchingConfig(),
}
REQUESTS = 256

Request = dict[str, NDArray]


@dataclass(frozen=True)
class Sample:
    """One measurement, or the medians of several."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms_per_request: float
    rows_per_batch: float


def requests_from_inputs(inputs: tuple[TensorInfo, ...]) -> list[Request]:
    """Requests of one row: texts where there is an attention mask, otherwise noise of the model's shape."""
    rng = np.random.default_rng(0)
    names = {tensor.name for tensor in inputs}
    if "attention_mask" not in names:
        shapes = {t.name: (1, *(size if isinstance(size, int) else 224 for size in t.shape[1:])) for t in inputs}
        dtypes = {tensor.name: tensor.dtype for tensor in inputs}
        return [
            {name: rng.normal(size=shape).astype(dtypes[name]) for name, shape in shapes.items()}
            for _ in range(REQUESTS // 8)
        ]
    requests = []
    for length in np.clip(rng.lognormal(np.log(12), 0.6, REQUESTS), 3, 64).astype(int):
        values = {"input_ids": rng.integers(1000, 20000, (1, length)), "attention_mask": np.ones((1, length))}
        requests.append({t.name: values.get(t.name, np.zeros((1, length))).astype(t.dtype) for t in inputs})
    return requests


def measure(engine: Engine, requests: list[Request], clients: int, seconds: float) -> Sample:
    """Let so many clients send requests for so long."""
    latencies: list[list[float]] = [[] for _ in range(clients)]
    rows, calls = _batches(engine)
    start, cpu = time.perf_counter(), time.process_time()

    def client(number: int) -> None:
        position = number * len(requests) // clients
        while (sent := time.perf_counter()) < start + seconds:
            engine.infer(requests[position % len(requests)])
            latencies[number].append(time.perf_counter() - sent)
            position += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken, cpu = time.perf_counter() - start, time.process_time() - cpu
    every = [latency for own in latencies for latency in own]
    p50, p99 = np.percentile(every, (50, 99)) * 1e3
    rows_after, calls_after = _batches(engine)
    return Sample(
        len(every) / taken, float(p50), float(p99), cpu / len(every) * 1e3, (rows_after - rows) / (calls_after - calls)
    )


def _batches(engine: Engine) -> tuple[float, float]:
    """Rows and calls so far."""
    labels = {"model": engine.info.name}
    read = engine.metrics.registry.get_sample_value
    return read("kiln_batch_size_sum", labels) or 0.0, read("kiln_batch_size_count", labels) or 0.0


def bench(name: str, bundle: Path, arguments: argparse.Namespace) -> list[dict[str, object]]:
    engines = {mode: Engine.open(bundle, batching=config, threads=arguments.threads) for mode, config in MODES.items()}
    requests = requests_from_inputs(engines["on"].info.inputs)
    for engine in engines.values():  # warm up, and let the first batches be judged
        measure(engine, requests, max(CLIENTS), 0.5)
    found = []
    for clients in CLIENTS:
        samples: dict[str, list[Sample]] = {mode: [] for mode in MODES}
        for _ in range(arguments.rounds):
            for mode, engine in engines.items():
                samples[mode].append(measure(engine, requests, clients, arguments.seconds))
        for mode in MODES:
            columns = zip(*(asdict(sample).values() for sample in samples[mode]), strict=True)
            median = Sample(*(round(statistics.median(column), 2) for column in columns))
            print(
                f"{name:<14}{clients:>8}  {mode:<12}{median.requests_per_s:>12.1f}{median.p50_ms:>10.2f}"
                f"{median.p99_ms:>10.2f}{median.cpu_ms_per_request:>9.2f}{median.rows_per_batch:>7.1f}",
                flush=True,
            )
            found.append({"model": name, "clients": clients, "mode": mode} | asdict(median))
    for engine in engines.values():
        engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", metavar="NAME=BUNDLE")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of one call; by default every CPU")
    arguments = parser.parse_args()
    for entry in arguments.bundles:
        if "=" not in entry:
            parser.error(f"found {entry}; expected NAME=BUNDLE")
    print(
        f"{'model':<14}{'clients':>8}  {'batching':<12}{'requests/s':>12}{'P50, ms':>10}{'P99, ms':>10}"
        f"{'CPU, ms':>9}{'rows':>7}"
    )
    found = []
    for entry in arguments.bundles:
        name, bundle = entry.split("=", 1)
        found += bench(name, Path(bundle), arguments)
    settings = {"seconds": arguments.seconds, "rounds": arguments.rounds, "threads": arguments.threads}
    print(json.dumps({"batching": found} | settings))


if __name__ == "__main__":
    main()
