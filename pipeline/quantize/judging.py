"""The gate over a quantised engine in a build: on which data, and how a candidate with more layers kept is made."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from engines.runtime.tokenizer import Tokenizer
from passes.onnx_model import OnnxModel, onnx_model_from_path
from pipeline.calibration import CalibrationConfig
from pipeline.calibration.data import calibration_set
from pipeline.calibration.subject import CalibrationModel
from pipeline.gate.config import GateConfig
from pipeline.gate.gate import run_gate
from pipeline.gate.generation import GenerationConfig
from pipeline.gate.graphs import GraphFile
from pipeline.gate.limits import GateLimits, limits_from_toml
from pipeline.gate.material import (
    DecoderData,
    GateData,
    PlainData,
    PlainStratum,
    Sample,
    decoder_data_from_tokens,
    default_cuts,
    samples_from_npz,
)
from pipeline.gate.report import GateReport
from pipeline.progress import Progress
from pipeline.quantize.config import QuantizeConfig
from pipeline.quantize.material import ORIGIN, default_text
from plugins.errors import KilnError

_MOST_CHARACTERS = 400_000
"""Of a text: the gate scores some 14,000 tokens of it."""
_OTHER_SEED = 1
"""Added to calibration's: the gate judges on other samples where there are enough."""


def judge_engine(
    reference: OnnxModel,
    candidate: Path,
    schemes: tuple[str, ...],
    subject: CalibrationModel,
    specs: Callable[[], Sequence[str]],
    config: QuantizeConfig,
    rebuild: Callable[[Sequence[str]], Path] | None,
    progress: Progress,
    threads: int | None = None,
    layers: GraphFile | None = None,
) -> GateReport:
    """Hold a quantised graph against the float one. `specs` names what was or would be calibrated on.

    `layers` is a float graph whose layers have the candidate's scales, where smoothing has changed them. Without
    `rebuild` the layers to keep are named and not tried.
    """
    limits = limits_from_toml(config.limits) if config.limits else GateLimits()
    data: GateData
    generation = GenerationConfig()
    decoder = onnx_model_from_path(candidate).decoder
    if decoder is not None:
        context = decoder.max_context
        tokens = min(config.generate, context // 4)
        generation = GenerationConfig(greedy=min(generation.greedy, tokens), continuation=tokens)
        data = _texts(subject.tokenizer, config, context, tokens)
    else:
        data = _samples(subject, specs, config)
    gate = GateConfig(schemes=schemes, generation=generation, threads=threads, reference_graph=layers)
    return run_gate(reference.path, candidate, data, limits, gate, progress, rebuild)


def _texts(tokenizer: Tokenizer | None, config: QuantizeConfig, context: int, new_tokens: int) -> DecoderData:
    if tokenizer is None:
        raise KilnError("the gate needs text, and the model has no tokenizer; build from a model that has one")
    if config.text is None:
        text, origin = default_text(), ORIGIN
    else:
        try:
            text, origin = config.text.read_text(encoding="utf-8"), str(config.text)
        except (OSError, UnicodeDecodeError) as error:
            raise KilnError(f"the gate's text {config.text} cannot be read as UTF-8: {error}") from error
    ids = tokenizer.encode(text[:_MOST_CHARACTERS])
    return decoder_data_from_tokens([ids], default_cuts(context, new_tokens), origin)


def _samples(subject: CalibrationModel, specs: Callable[[], Sequence[str]], config: QuantizeConfig) -> PlainData:
    if config.samples is not None:
        samples = samples_from_npz(config.samples)
        kind = "classifier" if samples[0].labels is not None else "embedding"
        return PlainData(kind, (PlainStratum("all", samples),), str(config.samples))  # type: ignore[arg-type]
    calibration: CalibrationConfig = config.calibration
    drawn = calibration_set(
        specs(), subject, replace(calibration.data, seed=calibration.data.seed + _OTHER_SEED, samples=16)
    )
    strata = tuple(
        PlainStratum(name, [Sample(s.read()) for s in drawn.samples if drawn.stratum_of(s) == name])
        for name, count in drawn.counts.items()
        if count
    )
    kind = "classifier" if _classifies(subject) else "embedding"
    return PlainData(kind, strata, f"calibration data, drawn anew: {drawn.origin}")  # type: ignore[arg-type]


def _classifies(subject: CalibrationModel) -> bool:
    """One output of scores for a few hundred classes of images."""
    outputs = subject.model.outputs
    return len(outputs) == 1 and len(outputs[0].shape) == 2 and not subject.takes_tokens
