"""What a profile runs: the phases of a bundle, how it is opened for them, and the requests of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.bundle import EngineBundle
from engines.runtime.batch_queue import BatchingConfig
from engines.runtime.engine import Engine
from engines.runtime.opening import default_config
from engines.runtime.scheduler import SchedulerConfig
from engines.runtime.sequence import blocks_for
from engines.runtime.tokenizer import Tokenizer
from pipeline.compare.inputs import InputSpec, input_specs_from_graph, sample_of_batch
from pipeline.profile.backends import Open, captured_sizes, opener_of_decoder, opener_of_model
from pipeline.profile.graph_facts import GraphFacts, facts_of_decoder
from pipeline.profile.recording import (
    Pass,
    RecordingDecoder,
    RecordingModel,
    Step,
    call_passes,
    decode_passes,
    prefill_passes,
    recorder_of_decoder,
    run_again,
)
from plugins.errors import KilnError


@dataclass(frozen=True)
class ProfileConfig:
    """What to run. Lengths in tokens; a model with a shorter context gets what it holds.

    prompt     of the prefill phase, in steps of `tokens_per_step`
    batches    sequences that decode together, after a prompt of `context`; samples, for a model without a KV cache
    tokens     that each of them generates, which is how many steps are measured
    """

    prompt: int = 512
    batches: tuple[int, ...] = (1, 16)
    context: int = 128
    tokens: int = 32
    repetitions: int = 5
    tokens_per_step: int = 512
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"prompt": 1, "context": 1, "tokens": 4, "repetitions": 1, "tokens_per_step": 1}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise KilnError(f"{name} is {getattr(self, name)}; expected at least {smallest}")
        if not self.batches or min(self.batches) < 1:
            raise KilnError(f"batches are {self.batches}; expected numbers from 1, as in 1,16")
        if self.threads is not None and self.threads < 1:
            raise KilnError(f"threads is {self.threads}; expected at least 1, or none for every CPU")


@dataclass(frozen=True)
class Kind:
    """A phase to run: `play` gives its passes on an engine, which a recorder watches."""

    name: str
    title: str
    tokens: int
    play: Callable[[Engine, Any], list[Pass]]


@dataclass(frozen=True)
class Session:
    """How one kind of bundle is opened with and without the profiler, and watched."""

    open: Open
    watch: Callable[[Any], Any]
    engine: Callable[[Any], Engine]
    replay: Callable[[Any, Kind, Step], object]
    """Run a step again, to its end."""
    facts: GraphFacts
    at_opening: int = 0
    """Runs that a session with the profiler makes while it is opened."""


def decoder_workload(bundle: EngineBundle, config: ProfileConfig, threads: int) -> tuple[list[Kind], Session]:
    decoder = bundle.manifest.decoder
    assert decoder is not None
    longest = decoder.max_context - 1
    length = min(config.prompt, longest)
    new = min(config.tokens, max(decoder.max_context // 2, 1))
    start = min(config.context, decoder.max_context - new)
    generator = np.random.default_rng(config.seed)

    def prompt(tokens: int) -> tuple[int, ...]:
        return tuple(generator.integers(0, decoder.vocab_size, tokens).tolist())

    def prefill(engine: Engine, recorder: RecordingDecoder) -> list[Pass]:
        return prefill_passes(engine, recorder, [prompt(length) for _ in range(config.repetitions + 1)])

    def decode(batch: int) -> Callable[[Engine, RecordingDecoder], list[Pass]]:
        return lambda engine, recorder: decode_passes(engine, recorder, [prompt(start) for _ in range(batch)], new)

    scheduling = _scheduling(bundle, config)
    size, most = decoder.kv.block_size, scheduling.max_running
    blocks = max(blocks_for(length + 1, size), most * blocks_for(start + new, size)) + 1
    ladder = captured_sizes(bundle.manifest, config.batches)
    tokenizer = Tokenizer(bundle.tokenizer_path) if bundle.tokenizer_path else None
    session = Session(
        opener_of_decoder(bundle, decoder, scheduling, blocks, threads, ladder),
        recorder_of_decoder,
        lambda recorder: Engine.from_decoder(recorder, decoder, tokenizer, scheduling),
        lambda backend, kind, step: run_again(backend, step),
        GraphFacts() if bundle.manifest.tensorrt else facts_of_decoder(bundle.engine_path, decoder),
        len(ladder),
    )
    kinds = [Kind(f"prefill_{length}", f"prefill, {length} tokens", length, prefill)]
    for batch in config.batches:
        title = f"decode, batch {batch}, context {start + new // 2}"
        kinds.append(Kind(f"decode_batch_{batch}", title, batch, decode(batch)))
    return kinds, session


def _scheduling(bundle: EngineBundle, config: ProfileConfig) -> SchedulerConfig:
    """A place for each sequence of the largest batch. Raises KilnError beyond what a plan was built for."""
    most, tokens = max(config.batches), max(config.tokens_per_step, *config.batches)
    if bundle.manifest.tensorrt is not None:
        limits = default_config(bundle.manifest)
        if most > limits.max_running:
            raise KilnError(
                f"batches go up to {most}, but {bundle.path} was built for at most {limits.max_running} sequences: "
                "give smaller --batches, or build it anew with --max-running"
            )
        tokens = min(tokens, limits.tokens_per_step)
    return SchedulerConfig(most, tokens_per_step=tokens, step_stretch=None, share_prefixes=False, headroom=0)


def plain_workload(bundle: EngineBundle, config: ProfileConfig, threads: int) -> tuple[list[Kind], Session]:
    manifest = bundle.manifest
    if manifest.tensorrt is None:
        specs = input_specs_from_graph(bundle.engine_path, manifest.inputs)
    else:  # a plan does not say what its inputs select from
        specs = tuple(InputSpec(one.name, one.dtype, one.shape, 0, 1) for one in manifest.inputs)
    kinds, feeds = [], {}
    for batch in config.batches:
        sample = sample_of_batch(specs, batch, config.seed)
        found = next((value.shape[0] for value in sample.values() if value.ndim), 1)
        if found != batch and f"batch_{found}" in feeds:
            continue  # the model's batch is fixed, and measured already
        feeds[f"batch_{found}"] = sample
        form = " ".join(dict.fromkeys("x".join(map(str, value.shape)) for value in sample.values()))

        def play(engine: Engine, recorder: RecordingModel, sample: Any = sample) -> list[Pass]:
            return call_passes(engine, recorder, sample, max(config.repetitions, config.tokens))

        kinds.append(Kind(f"batch_{found}", f"inputs {form}", found, play))

    batching = BatchingConfig(max_batch=max(kind.tokens for kind in kinds))
    session = Session(
        opener_of_model(bundle, threads),
        RecordingModel,
        lambda recorder: Engine.from_model(recorder, batching=batching),
        lambda backend, kind, step: backend.infer(feeds[kind.name]),
        GraphFacts(),
    )
    return kinds, session
