"""The accuracy gate of a candidate: held against `stable`, or against its source where there is none yet.

What is measured and its limits are `pipeline.gate`'s. Here it is chosen on what: the user's data, or what every model
takes, text for a decoder and random inputs for any other model.
"""

from pathlib import Path
from typing import Any

import numpy as np

from engines.bundle import EngineBundle, open_bundle
from engines.manifest import Manifest
from engines.runtime.tokenizer import Tokenizer
from pipeline.compare.inputs import input_specs_from_graph, samples_from_inputs
from pipeline.gate.config import GateConfig
from pipeline.gate.gate import run_gate
from pipeline.gate.generation import GenerationConfig
from pipeline.gate.html import write_html
from pipeline.gate.limits import GateLimits, limits_from_toml
from pipeline.gate.material import (
    DecoderData,
    PlainData,
    PlainKind,
    PlainStratum,
    Sample,
    decoder_data_from_tokens,
    default_cuts,
    samples_from_npz,
)
from pipeline.io_layout import original_specs, permutations_from_path
from pipeline.nightly.config import AccuracyOptions
from pipeline.progress import Progress
from pipeline.quantize.material import ORIGIN, default_text
from plugins.errors import KilnError

_CHARACTERS = 200_000
"""Of a text: the strata take some 14,000 tokens."""
_RANDOM_TOKENS = 16_000


def judge_accuracy(
    reference: Path | str,
    candidate: Path,
    options: AccuracyOptions,
    threads: int | None,
    page: Path,
    progress: Progress,
) -> dict[str, Any]:
    """The verdict, and the gate's page. Raises KilnError for what cannot be judged, such as NaN outputs."""
    bundle = open_bundle(candidate)
    decoder = bundle.manifest.decoder
    limits = limits_from_toml(options.limits) if options.limits else GateLimits()
    generation = GenerationConfig()
    data: DecoderData | PlainData
    if decoder is not None:
        tokens = min(options.generate, max(1, decoder.max_context // 4))
        generation = GenerationConfig(greedy=min(generation.greedy, tokens), continuation=tokens)
        data = _texts(bundle, options, decoder.vocab_size, decoder.max_context, tokens)
    else:
        data = _samples(bundle, options)
    config = GateConfig(
        schemes=schemes_of(bundle.manifest), generation=generation, threads=threads, layers=False, max_trials=0
    )
    report = run_gate(reference, candidate, data, limits, config, progress)
    write_html(report, page)
    checks = {f"{check.check.title}, {check.stratum}": check.check for check in report.checks if check.judged}
    figures = _finite({name: check.value for name, check in checks.items()})
    higher = [name for name, check in checks.items() if check.direction == "at least"]
    return {"passed": report.passed, "text": report.sentence(), "figures": figures, "higher": higher}


def schemes_of(manifest: Manifest) -> tuple[str, ...]:
    """How a bundle's layers and cache are stored, as the gate's limits know it."""
    record = manifest.quantization
    if record is None:
        return ("float",)
    cache = (f"int8-{record.kv}",) if record.kv in ("k", "kv") else ()
    return (*record.schemes, *cache) or ("float",)


def _texts(
    bundle: EngineBundle, options: AccuracyOptions, vocabulary: int, context: int, new_tokens: int
) -> DecoderData:
    cuts = default_cuts(context, new_tokens)
    if bundle.tokenizer_path is None:
        if options.text is not None:
            raise KilnError(f"{bundle.manifest.name} has no tokenizer, so it takes no text; leave accuracy.text out")
        generator = np.random.default_rng(options.seed)
        ids = generator.integers(0, vocabulary, max(_RANDOM_TOKENS, context)).tolist()
        return decoder_data_from_tokens([ids], cuts, f"random tokens, seed {options.seed}: there is no tokenizer")
    text, origin = default_text(), ORIGIN
    if options.text is not None:
        try:
            text, origin = options.text.read_text(encoding="utf-8"), str(options.text)
        except (OSError, UnicodeDecodeError) as error:
            raise KilnError(f"the gate's text {options.text} cannot be read as UTF-8: {error}") from error
    ids = Tokenizer(bundle.tokenizer_path).encode(text[:_CHARACTERS])
    return decoder_data_from_tokens([ids], cuts, origin)


def _samples(bundle: EngineBundle, options: AccuracyOptions) -> PlainData:
    outputs = bundle.manifest.outputs
    kind: PlainKind = "embedding"
    if options.samples is not None:
        samples = samples_from_npz(options.samples)
        if samples[0].labels is not None:
            kind = "classifier"
        return PlainData(kind, (PlainStratum("all", samples),), str(options.samples))
    specs = input_specs_from_graph(bundle.engine_path, bundle.manifest.inputs)
    specs = original_specs(specs, permutations_from_path(bundle.engine_path))
    drawn = samples_from_inputs(specs, options.count, options.seed)
    if len(outputs) == 1 and len(outputs[0].shape) == 2 and all(np.dtype(spec.dtype).kind == "f" for spec in specs):
        kind = "classifier"
    strata = (PlainStratum("random", [Sample(feeds) for feeds in drawn]),)
    return PlainData(kind, strata, f"{options.count} random samples, seed {options.seed}")


def _finite(figures: dict[str, float]) -> dict[str, float | str]:
    return {name: value if np.isfinite(value) else str(value) for name, value in figures.items()}
