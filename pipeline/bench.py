"""`kiln bench`: how fast a bundle runs here, and how far each figure is from what this machine could do at best.

Speed is taken through the runtime that serves requests. Limits are measured in the same run, before and after,
the better counts: L_read, bytes/s that the threads read from memory, and L_product, FP32 operations/s of ONNX
Runtime's MatMul, best over a few shapes. With them, floors, the best values possible (`pipeline.floors` counts
operations and bytes):

    prefill n       n / max(prefill operations(n) / L_product, weight bytes / L_read)         tokens/s
    decode, batch b b / max(decode bytes(b, c) / L_read, decode operations(b, c) / L_product)  tokens/s
                    where c is the mean context of the measured steps
    first token n   max(prefill operations(n) / L_product, weight bytes / L_read)             s
    peak memory     weight bytes + bytes of the keys and values held at once                  bytes
    latency b       max(operations(b) / L_product, weight bytes / L_read)                     s
    throughput b    b / that latency                                                          samples/s

The ratio is how much of the floor is reached: 1 is the limit, 0.5 half of it. Products of integers can be faster than
L_product, so that a quantised engine may exceed it where products are the limit.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from engines.bundle import EngineBundle, open_bundle
from engines.manifest import MemoryRecord
from engines.runtime.engine import Engine
from engines.runtime.request import Request, SamplingParams
from engines.runtime.scheduler import SchedulerConfig
from passes.onnx_model import DecoderSpec
from pipeline.compare.inputs import input_specs_from_graph, sample_of_batch
from pipeline.compare.machine import machine_description, package_versions
from pipeline.floors import decoder_work_from_graph, plain_operations, weight_bytes
from pipeline.limits import Limits, best_limits, measure_limits, peak_memory, reset_peak_memory
from pipeline.memory import memory_account
from pipeline.progress import Progress
from plugins.errors import KilnError
from plugins.measure import usable_cpus

_TRIES = 5
"""To measure decoding: sequences may miss each other."""


@dataclass(frozen=True)
class BenchConfig:
    """Options of a measurement. Lengths in tokens; a model with a shorter context gets the longest it holds.

    Decoding is measured over `decode_tokens` after a prompt of `decode_prompt`.
    """

    threads: int | None = None
    repetitions: int = 3
    prompt_lengths: tuple[int, ...] = (512, 2048)
    decode_batches: tuple[int, ...] = (1, 16)
    decode_prompt: int = 128
    decode_tokens: int = 64
    batches: tuple[int, ...] = (1, 8)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise KilnError(f"repetitions is {self.repetitions}; expected at least 1")
        for name, least in (("decode_prompt", 1), ("decode_tokens", 2)):
            if getattr(self, name) < least:
                raise KilnError(f"{name} is {getattr(self, name)}; expected at least {least}")
        if self.threads is not None and self.threads < 1:
            raise KilnError(f"threads is {self.threads}; expected at least 1, or none for every CPU")


@dataclass(frozen=True)
class Figure:
    """Median, lowest and highest of the repetitions. `floor` is the best possible value, None where it is unknown."""

    name: str
    title: str
    unit: str
    median: float
    lowest: float
    highest: float
    floor: float | None
    bound_by: str
    higher_is_better: bool = True
    values: tuple[float, ...] = ()
    """Of the repetitions."""

    @property
    def ratio(self) -> float | None:
        """Share of the floor that is reached, at most about 1."""
        if not self.floor:
            return None
        return self.median / self.floor if self.higher_is_better else self.floor / self.median


@dataclass(frozen=True)
class BenchReport:
    """Everything that one measurement found."""

    created: str
    bundle: str
    sha256: str
    name: str
    threads: int
    repetitions: int
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    limits: Limits
    figures: tuple[Figure, ...]
    memory: MemoryRecord | None = None
    """Where memory goes by the engine's own account."""
    peaks: Mapping[str, float] = field(default_factory=dict)
    """Most bytes of resident memory of this process by phase."""

    def to_json(self) -> str:
        """One line."""
        document = asdict(self)
        document["memory"] = None if self.memory is None else self.memory.model_dump()
        document["figures"] = [{**asdict(figure), "ratio": figure.ratio} for figure in self.figures]
        return json.dumps(document, allow_nan=False)


@dataclass(frozen=True)
class _Sample:
    """Values of the repetitions, and what the floor is computed from."""

    name: str
    title: str
    unit: str
    values: list[float]
    operations: float | None
    read: float
    units_of_work: float  # tokens or samples that the operations and bytes stand for; 0 for a time
    higher_is_better: bool = True


def bench(bundle_path: Path, config: BenchConfig, progress: Progress) -> BenchReport:
    """Measure a bundle on this machine. Raises KilnError for a bundle that must not be opened."""
    bundle = open_bundle(bundle_path)
    threads = config.threads or usable_cpus()
    with progress.stage("measure this machine's limits"):
        before = measure_limits(threads)
    # The engine is measured, not how requests share it: prompts in large pieces, also beside decoding.
    scheduling = SchedulerConfig(
        max(config.decode_batches), tokens_per_step=512, step_stretch=None, share_prefixes=False
    )
    peaks: dict[str, float] = {}
    with _phase("open", "open", peaks, progress):
        engine = Engine.open(bundle_path, config=scheduling, threads=threads)
    with engine:
        decoder = bundle.manifest.decoder
        if decoder is None:
            samples, memory_floor = _bench_plain(engine, bundle, config, peaks, progress)
        else:
            samples, memory_floor = _bench_decoder(engine, bundle, decoder, config, peaks, progress)
    memory = max(peaks.values(), default=None)
    account = bundle.manifest.memory
    if account is None:
        with progress.stage("account for memory"):
            account = memory_account(bundle.engine_path, decoder, bundle.manifest.inputs, bundle.plugin_paths)
    with progress.stage("measure the limits again"):
        limits = best_limits(before, measure_limits(threads))
    figures = [_figure_from_sample(sample, limits) for sample in samples]
    if memory is not None:
        figures.append(
            Figure(
                "peak_memory",
                "peak memory",
                "bytes",
                memory,
                memory,
                memory,
                memory_floor,
                "weights and cache",
                False,
                (memory,),
            )
        )
    return BenchReport(
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        bundle=str(bundle_path),
        sha256=bundle.sha256,
        name=bundle.manifest.name,
        threads=threads,
        repetitions=config.repetitions,
        machine=machine_description(),
        versions={"kiln": bundle.manifest.kiln_version, **package_versions("onnxruntime")},
        limits=limits,
        figures=tuple(figures),
        memory=account,
        peaks=peaks,
    )


@contextmanager
def _phase(title: str, name: str, peaks: dict[str, float], progress: Progress) -> Iterator[None]:
    """A stage whose peak of memory is its own."""
    reset_peak_memory()
    with progress.stage(title):
        yield
    peak = peak_memory()
    if peak is not None:
        peaks[name] = peak


def _figure_from_sample(sample: _Sample, limits: Limits) -> Figure:
    reading = sample.read / limits.read_bandwidth
    computing = None if sample.operations is None else sample.operations / limits.product_rate
    seconds = None if computing is None else max(reading, computing)
    floor = None if seconds is None else (sample.units_of_work / seconds if sample.higher_is_better else seconds)
    bound_by = "unknown" if computing is None else "products" if computing > reading else "reading"
    return Figure(
        name=sample.name,
        title=sample.title,
        unit=sample.unit,
        median=statistics.median(sample.values),
        lowest=min(sample.values),
        highest=max(sample.values),
        floor=floor,
        bound_by=bound_by,
        higher_is_better=sample.higher_is_better,
        values=tuple(sample.values),
    )


def _bench_decoder(
    engine: Engine,
    bundle: EngineBundle,
    decoder: DecoderSpec,
    config: BenchConfig,
    peaks: dict[str, float],
    progress: Progress,
) -> tuple[list[_Sample], float]:
    """Samples, and the least memory in bytes."""
    work = decoder_work_from_graph(bundle.engine_path, decoder)
    generator = np.random.default_rng(config.seed)
    longest = engine.max_length - 1

    def prompt(tokens: int) -> tuple[int, ...]:
        return tuple(generator.integers(0, decoder.vocab_size, tokens).tolist())

    with _phase("warm up", "warm_up", peaks, progress):
        engine.generate([prompt(min(64, longest))], SamplingParams(max_tokens=1))
    samples, held = [], 0.0
    lengths = sorted({min(length, longest) for length in config.prompt_lengths})
    for length in lengths:
        with _phase(f"prefill {length}", f"prefill_{length}", peaks, progress):
            times = [_first_token_seconds(engine, prompt(length)) for _ in range(config.repetitions)]
        operations = work.prefill_operations(length)
        samples.append(
            _Sample(
                f"prefill_{length}",
                f"prefill, {length} tokens",
                "tokens/s",
                [length / seconds for seconds in times],
                operations,
                work.weight_bytes,
                length,
            )
        )
        if length == lengths[0]:
            title = f"first token, {length} tokens"
            first = _Sample("first_token", title, "s", times, operations, work.weight_bytes, 0, False)
        held = max(held, length + 1)
    for batch in config.decode_batches:
        new = min(config.decode_tokens, max(engine.max_length // 2, 1))
        start = min(config.decode_prompt, engine.max_length - new)
        with _phase(f"decode, batch {batch}", f"decode_batch_{batch}", peaks, progress):
            runs = [_decode_rate(engine, [prompt(start) for _ in range(batch)], new) for _ in range(config.repetitions)]
        context = start + new / 2
        samples.append(
            _Sample(
                f"decode_batch_{batch}",
                f"decode, batch {batch}, context {context:.0f}",
                "tokens/s",
                runs,
                work.decode_operations(batch, context),
                work.decode_bytes(batch, context),
                batch,
            )
        )
        held = max(held, batch * (start + new))
    return [*samples, first], work.weight_bytes + held * work.kv_bytes_per_token


def _first_token_seconds(engine: Engine, prompt: tuple[int, ...]) -> float:
    """Wall time from submitting to the first token."""
    request = Request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    start = time.perf_counter()
    next(engine.submit(request))
    return time.perf_counter() - start


def _decode_rate(engine: Engine, prompts: list[tuple[int, ...]], tokens: int) -> float:
    """Tokens/s of all sequences together while all of them decode.

    On a busy machine the first sequences may have ended when the last one starts: then they all start again.
    """
    for _ in range(_TRIES):
        times = _times_of_last(engine, prompts, tokens)
        if len(times) > 1:
            return len(prompts) * (len(times) - 1) / (times[-1] - times[0])
    raise KilnError(
        f"{len(prompts)} sequences of {tokens} tokens did not decode together for two steps in {_TRIES} tries; more "
        "tokens a sequence are needed, or a longer context where that is what limits them"
    )


def _times_of_last(engine: Engine, prompts: list[tuple[int, ...]], tokens: int) -> list[float]:
    """When the sequence that was submitted last got its tokens, until the first one ended."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    streams = [engine.submit(Request(prompt, sampling)) for prompt in prompts]
    times: list[float] = []

    def note(_: object) -> None:  # on the engine's own thread: a reader may come late
        if len(prompts) == 1 or not streams[0].done:
            times.append(time.perf_counter())

    streams[-1].forward(note)
    for stream in streams:
        stream.result()
    return times[:-1] if len(times) > 2 else times  # the last step may have been a smaller one


def _bench_plain(
    engine: Engine, bundle: EngineBundle, config: BenchConfig, peaks: dict[str, float], progress: Progress
) -> tuple[list[_Sample], float]:
    """Samples, and the least memory in bytes."""
    specs = input_specs_from_graph(bundle.engine_path, bundle.manifest.inputs)
    read = weight_bytes(bundle.engine_path)
    samples = []
    for batch in config.batches:
        feeds = sample_of_batch(specs, batch, config.seed)
        shapes = {name: value.shape for name, value in feeds.items()}
        batch_of_feeds = next((shape[0] for shape in shapes.values() if shape), 1)
        if batch_of_feeds != batch:
            progress.note(f"batch {batch} left out: the model's batch is fixed at {batch_of_feeds}")
            continue
        with _phase(f"batch {batch}", f"batch_{batch}", peaks, progress):
            times = _seconds_of_calls(lambda feeds=feeds: engine.infer(feeds), config.repetitions)  # type: ignore[misc]
        operations = plain_operations(bundle.engine_path, feeds)
        form = " ".join(dict.fromkeys("x".join(map(str, shape)) for shape in shapes.values()))
        rates = [batch / seconds for seconds in times]
        samples.append(
            _Sample(f"latency_batch_{batch}", f"latency, inputs {form}", "s", times, operations, read, 0, False)
        )
        samples.append(
            _Sample(
                f"throughput_batch_{batch}", f"throughput, batch {batch}", "samples/s", rates, operations, read, batch
            )
        )
    return samples, read


def _seconds_of_calls(call: Callable[[], object], repetitions: int) -> list[float]:
    """Mean seconds a call in each of `repetitions` rounds of at least 0.3 s, after one call to warm up."""
    call()
    rounds = []
    for _ in range(repetitions):
        calls, start = 0, time.perf_counter()
        while calls == 0 or time.perf_counter() - start < 0.3:
            call()
            calls += 1
        rounds.append((time.perf_counter() - start) / calls)
    return rounds
