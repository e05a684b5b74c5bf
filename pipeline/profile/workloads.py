"""What a profile runs: the phases of a bundle, how it is opened for them, and the requests of each."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engines.backends.base import DecoderBackend
from engines.backends.onnxruntime import CPU, OnnxRuntimeDecoder, OnnxRuntimeModel
from engines.bundle import EngineBundle
from engines.manifest import Manifest
from engines.runtime.batch_queue import BatchingConfig
from engines.runtime.engine import Engine
from engines.runtime.opening import cuda_decoder, default_config, default_ladder
from engines.runtime.scheduler import SchedulerConfig
from engines.runtime.sequence import blocks_for
from engines.runtime.tokenizer import Tokenizer
from pipeline.compare.inputs import input_specs_from_graph, sample_of_batch
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

    open: Callable[[Path | None, Mapping[str, str] | None], Any]
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

    most = max(config.batches)
    scheduling = SchedulerConfig(
        most, tokens_per_step=max(config.tokens_per_step, most), step_stretch=None, share_prefixes=False, headroom=0
    )
    size = decoder.kv.block_size
    blocks = max(blocks_for(length + 1, size), most * blocks_for(start + new, size)) + 1

    on_cpu = bundle.manifest.backend.provider == CPU
    ladder = () if on_cpu else captured_sizes(bundle.manifest, config.batches)

    def open_backend(file: Path | None, entries: Mapping[str, str] | None) -> DecoderBackend:
        if not on_cpu:  # whose operators take weights as they are stored, so that `entries` have nothing to say
            return cuda_decoder(bundle, decoder, scheduling, blocks, 0, None, ladder, profile=file)
        return OnnxRuntimeDecoder(
            bundle.engine_path,
            decoder.kv,
            blocks,
            plugins=bundle.plugin_paths,
            threads=threads,
            config=entries,
            profile=file,
        )

    tokenizer = Tokenizer(bundle.tokenizer_path) if bundle.tokenizer_path else None
    session = Session(
        open_backend,
        recorder_of_decoder,
        lambda recorder: Engine.from_decoder(recorder, decoder, tokenizer, scheduling),
        lambda backend, kind, step: run_again(backend, step),
        facts_of_decoder(bundle.engine_path, decoder),
        len(ladder),
    )
    kinds = [Kind(f"prefill_{length}", f"prefill, {length} tokens", length, prefill)]
    for batch in config.batches:
        title = f"decode, batch {batch}, context {start + new // 2}"
        kinds.append(Kind(f"decode_batch_{batch}", title, batch, decode(batch)))
    return kinds, session


def captured_sizes(manifest: Manifest, batches: Collection[int]) -> tuple[int, ...]:
    """Of the decode steps that a GPU captures when it serves, those that these batches take."""
    served = default_ladder(manifest, max(default_config(manifest).max_running, *batches))
    return tuple(sorted({next(size for size in served if size >= batch) for batch in batches}))


def plain_workload(bundle: EngineBundle, config: ProfileConfig, threads: int) -> tuple[list[Kind], Session]:
    specs = input_specs_from_graph(bundle.engine_path, bundle.manifest.inputs)
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

    def open_backend(file: Path | None, entries: Mapping[str, str] | None) -> OnnxRuntimeModel:
        return OnnxRuntimeModel(
            bundle.engine_path,
            provider=bundle.manifest.backend.provider,
            plugins=bundle.plugin_paths,
            threads=threads,
            config=entries,
            profile=file,
            options=bundle.manifest.backend.options,
        )

    batching = BatchingConfig(max_batch=max(kind.tokens for kind in kinds))
    session = Session(
        open_backend,
        RecordingModel,
        lambda recorder: Engine.from_model(recorder, batching=batching),
        lambda backend, kind, step: backend.infer(feeds[kind.name]),
        GraphFacts(),
    )
    return kinds, session
