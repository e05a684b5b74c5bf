"""The stage of a build that quantises: calibrate where the schemes need it, plan, and give the passes that do it.

Nothing is written but what the caller names. The verdict on the result is the gate's (`pipeline.quantize.judging`).
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from numpy.typing import NDArray

from engines.runtime.tokenizer import Tokenizer
from passes.attention_precision import AttentionPrecision
from passes.base import Pass
from passes.onnx_model import OnnxModel
from passes.quantization.layers import Layer, layers_of, name_layers
from passes.quantization.plan import STATIC, LayerPlan, PrecisionPlan, plan_from_toml
from passes.quantization.rewrite import check_plan, kernels_of, quantising_passes
from passes.quantization.table import CalibrationTable, table_from_json
from passes.quantize_cache import QuantizeCache
from passes.standard import PassTarget
from pipeline.calibration import calibrate
from pipeline.calibration.calibrating import covered_set
from pipeline.calibration.moments import moments_of
from pipeline.calibration.running import ObservingSession, prepared_graph
from pipeline.calibration.samples import TOKENS, CalibrationSet
from pipeline.calibration.subject import CalibrationModel
from pipeline.gate.limits import COSINE, PERPLEXITY, limits_from_toml
from pipeline.progress import Progress
from pipeline.quantize.candidates import Rewrites, candidate
from pipeline.quantize.choices import Choices, choices_for
from pipeline.quantize.choose import choice_from_finding, choose, cost_of
from pipeline.quantize.config import QuantizeConfig
from pipeline.quantize.judge import DecoderJudge, Difference, Judge, PlainJudge, Text
from pipeline.quantize.latency import LayerClock, Phase
from pipeline.quantize.material import ORIGIN, default_text
from pipeline.quantize.sensitivity import Findings, measure_sensitivity
from pipeline.quantize.smoothing import layers_to_smooth, smoothed
from pipeline.quantize.trim import trimmed
from pipeline.verify import StepClock
from plugins.errors import KilnError

_PROMPT, _ANSWER = 512, 128
"""Tokens of the request whose time a decoder's layers are weighed by."""
_JUDGED = 6
"""Samples of a stratum on which single layers are judged."""
_JUDGED_WHOLE = 2
"""And on which whole plans are, where they are tried one after the other."""
_RANKED = 512
"""Tokens of the text on which layers are ranked, or fewer."""
_POSITIONS = 128
"""Positions of a text at which they are."""


@dataclass(frozen=True)
class Quantisation:
    """A plan for one graph and what it rests on."""

    plan: PrecisionPlan
    table: CalibrationTable | None
    layers: tuple[Layer, ...]
    target: PassTarget
    moments: Mapping[str, NDArray]
    subject: CalibrationModel
    specs: Callable[[], tuple[str, ...]]
    """Names the data on which the model was or would be calibrated. Raises KilnError where there is none."""
    config: QuantizeConfig
    attends_in_bf16: bool

    def passes(self, keep: Sequence[str] = ()) -> list[Pass]:
        """Those that apply the plan, with more layers kept float."""
        plan = self.plan.keeping(keep, "kept to pass the gate") if keep else self.plan
        passes = quantising_passes(plan, self.table, self.moments, self.target)
        if plan.kv:
            values = plan.kv == "int8-kv"
            passes.append(QuantizeCache(self.target.decoder, values=values, max_context=self.config.kv_limit))
        if self.attends_in_bf16:
            passes.append(AttentionPrecision("bfloat16"))
        return passes

    @property
    def schemes(self) -> tuple[str, ...]:
        """In use, the cache's included."""
        found = {layer.scheme for layer in self.plan.layers.values() if layer.scheme != "float"}
        return (*sorted(found), *((self.plan.kv,) if self.plan.kv else ())) or ("float",)


class _Stage:
    """What the steps share."""

    def __init__(
        self,
        model: CalibrationModel,
        target: PassTarget,
        config: QuantizeConfig,
        folder: Path,
        threads: int | None,
        progress: Progress,
    ) -> None:
        self.model, self.target, self.config = model, target, config
        self.folder, self.threads, self.progress = folder, threads, progress
        graph = prepared_graph(model)
        name_layers(graph)
        self.layers = layers_of(graph)
        self._data: CalibrationSet | None = None

    @property
    def sha256(self) -> str:
        return self.model.model.sha256

    @cached_property
    def specs(self) -> tuple[str, ...]:
        if self.config.specs:
            return self.config.specs
        if not self.model.takes_tokens or self.model.tokenizer is None:
            raise KilnError(
                "this model's calibration data cannot be made up; give --calibration: images, .npz batches, token ids "
                "or module:callable"
            )
        path = self.folder / "calibration.txt"
        path.write_text(default_text(), encoding="utf-8")
        self.progress.note(f"calibration data: {ORIGIN}")
        return (f"text:{path}",)

    def result(
        self, plan: PrecisionPlan, table: CalibrationTable | None, moments: Mapping[str, NDArray]
    ) -> Quantisation:
        return Quantisation(
            plan,
            table,
            tuple(self.layers),
            self.target,
            moments,
            self.model,
            lambda: self.specs,
            self.config,
            self._attends_in_bf16(plan),
        )

    def _attends_in_bf16(self, plan: PrecisionPlan) -> bool:
        """As the user says; by default where layers are quantised and a prompt is measured to take less time so."""
        if self.model.decoder is None or self.target.backend != "cpu" or self.config.attention == "fp32":
            return False
        if self.config.attention == "bf16" or not plan.quantised:
            return self.config.attention == "bf16"
        path = self.model.model.path
        with self.progress.stage("time attention"), candidate(path, plan, lambda plan: [AttentionPrecision()]) as other:
            timing = StepClock(self.model.model, self.model.plugins, threads=self.threads)(path, other)
        self.progress.detail(f"a prompt takes {timing.before * 1e3:.1f} ms, {timing.after * 1e3:.1f} attending in BF16")
        return timing.pays is True

    def data(self) -> CalibrationSet:
        if self._data is None:
            self._data = covered_set(self.specs, self.model, self.config.calibration, self.progress)[0]
        return self._data

    def table(self, plans: Sequence[LayerPlan], required: bool = False) -> CalibrationTable | None:
        """The user's, or one made now where a plan needs it or it is `required`."""
        if self.config.table is not None:
            table = table_from_json(self.config.table)
            table.require_model(self.sha256)
            return table
        if not (required or any(p.scheme in STATIC or p.smooth is not None or p.rounding == "awq" for p in plans)):
            return None
        config = self.config.calibration
        if any(layer.kind == "Conv" for layer in self.layers):  # all of such a network is computed in integers
            config = replace(config, observe=replace(config.observe, everything=True))
        found = calibrate(self.specs, self.model, config, self.progress)
        self._data = found.data
        return found.table

    def moments(self, plans: Mapping[str, Sequence[LayerPlan]]) -> dict[str, NDArray]:
        names = [name for name, options in plans.items() if any(plan.rounding in ("gptq", "awq") for plan in options)]
        if not names:
            return {}
        observe = self.config.calibration.observe
        found = moments_of(self.model, self.data(), observe, names, progress=self.progress)
        return {layer: item.second for item in found for layer in item.layers}


def quantisation_for(
    model: OnnxModel,
    plugins: Sequence[Path],
    tokenizer: Tokenizer | None,
    target: PassTarget,
    config: QuantizeConfig,
    folder: Path,
    progress: Progress,
    threads: int | None = None,
) -> Quantisation:
    """Plan the quantisation of a graph that the float passes have been over. `folder` is for temporary files.

    Raises KilnError for data, tables and plans that do not suit the model, and where nothing can be gained.
    """
    limit = model.decoder.max_context if model.decoder else (tokenizer.max_length if tokenizer else None)
    subject = CalibrationModel(model, tuple(plugins), tokenizer, limit)
    stage = _Stage(subject, target, config, folder, threads, progress)
    if config.plan is not None:
        return _given(stage, plan_from_toml(config.plan))
    choices = choices_for(stage.layers, target, config)
    searched = layers_to_smooth(config, choices)
    table = stage.table([plan for plans in choices.plans.values() for plan in plans], bool(searched))
    if searched and table is not None:
        observe = config.calibration.observe
        choices = smoothed(choices, searched, subject, stage.data(), table, kernels_of(target), observe, progress)
    moments = stage.moments(choices.plans)
    plan = _planned(stage, choices, table, moments)
    plan = replace(plan, kv=config.kv, origin=_origin(stage, table))
    return stage.result(plan, table, moments)


def _given(stage: _Stage, plan: PrecisionPlan) -> Quantisation:
    if plan.model_sha256 != stage.sha256:
        stage.progress.note(
            f"the plan was made for the graph {plan.model_sha256[:12]}, this one is {stage.sha256[:12]}"
        )
        plan = replace(plan, model_sha256=stage.sha256)
    plan = replace(plan.keeping(stage.config.kept(stage.layers), "kept: --keep"), kv=stage.config.kv or plan.kv)
    check_plan(plan, stage.layers, stage.target)
    table = stage.table(list(plan.layers.values()))
    moments = stage.moments({name: (layer,) for name, layer in plan.layers.items()})
    return stage.result(plan, table, moments)


def _planned(
    stage: _Stage, choices: Choices, table: CalibrationTable | None, moments: Mapping[str, NDArray]
) -> PrecisionPlan:
    def rewrites(plan: PrecisionPlan) -> list[Pass]:
        return quantising_passes(plan, table, moments, stage.target)

    planned = {name: LayerPlan(reason=reason) for name, reason in choices.left.items()}
    if stage.config.search in ("all", "accuracy") or not choices.plans:
        planned |= {name: plans[0] for name, plans in choices.plans.items()}
        plan = PrecisionPlan(stage.sha256, {layer.name: planned[layer.name] for layer in stage.layers})
        return _accurate(stage, plan, rewrites) if stage.config.search == "accuracy" and plan.quantised else plan
    saved = _with_neighbours(stage, choices, _saved(stage, choices, rewrites), rewrites)
    faster = {name: plans for name, plans in choices.plans.items() if max(saved[name]) > 0}
    if not faster:
        raise KilnError(
            f"none of the {len(choices.plans)} layers is faster as {stage.config.quant} on this machine; "
            "leave the model as it is, or try another --quant"
        )
    planned |= {name: LayerPlan(reason="not faster here") for name in choices.plans if name not in faster}
    if stage.config.search == "latency":
        planned |= {
            name: replace(plans[0], reason=f"saves {saved[name][0] * 1e3:.3g} ms") for name, plans in faster.items()
        }
    else:
        planned |= _within_limits(stage, faster, saved, rewrites, _context(stage, table))
    return PrecisionPlan(stage.sha256, {layer.name: planned[layer.name] for layer in stage.layers})


def _saved(stage: _Stage, choices: Choices, rewrites: Rewrites) -> dict[str, list[float]]:
    """Seconds that each layer's choices save over the workload."""
    by_name = {layer.name: layer for layer in stage.layers}
    path, plugins = stage.model.model.path, stage.model.plugins
    with stage.progress.stage("time layers") as update:
        clock = LayerClock(path, rewrites, plugins, _phases(stage), _shapes(stage), stage.threads)
        saved = {}
        for number, (name, plans) in enumerate(choices.plans.items(), 1):
            update(f"layer {number} of {len(choices.plans)}")
            saved[name] = [clock.saved(by_name[name], plan) for plan in plans]
    return saved


def _with_neighbours(
    stage: _Stage, choices: Choices, saved: Mapping[str, list[float]], rewrites: Rewrites
) -> Mapping[str, list[float]]:
    """Seconds saved, of a network of convolutions as a whole too: integers between two layers need no conversion.

    Where the network is faster with all of them quantised than with those alone that are faster by themselves, the
    others share what that saves.
    """
    slower = [name for name, seconds in saved.items() if seconds[0] <= 0]
    if not slower or not any(layer.kind == "Conv" and layer.name in choices.plans for layer in stage.layers):
        return saved
    every = PrecisionPlan(stage.sha256, {name: plans[0] for name, plans in choices.plans.items()})
    path, feeds = stage.model.model.path, [stage.data().samples[0].read()]
    with (
        stage.progress.stage("time the whole network"),
        candidate(path, every.keeping(slower, ""), rewrites) as alone,
        candidate(path, every, rewrites) as together,
    ):
        timing = StepClock(stage.model.model, stage.model.plugins, feeds, stage.threads)(alone, together)
    stage.progress.detail(f"a call takes {timing.before * 1e3:.2f} ms, {timing.after * 1e3:.2f} with all in integers")
    if timing.after >= timing.before:
        return saved
    share = (timing.before - timing.after) / len(slower)
    return {name: [share] * len(gains) if name in slower else gains for name, gains in saved.items()}


def _accurate(stage: _Stage, plan: PrecisionPlan, rewrites: Rewrites) -> PrecisionPlan:
    """The plan without the layers that are too noisy, judged whole."""
    judge = _judge(stage, _JUDGED_WHOLE)

    def cost(plan: PrecisionPlan) -> float:
        with candidate(stage.model.model.path, plan, rewrites) as made:
            return max(cost_of(difference) for difference in judge(made).values())

    allowed = _allowed(stage.model.decoder is not None, plan.layers.values(), stage.config.limits)
    sample = max(stage.data().samples, key=lambda sample: min(sample.length, _RANKED))
    with stage.progress.stage("choose layers"):
        return trimmed(plan, stage.model, rewrites, sample, cost, allowed, stage.threads, observe=stage.progress.detail)


def _within_limits(
    stage: _Stage,
    faster: Mapping[str, Sequence[LayerPlan]],
    saved: Mapping[str, Sequence[float]],
    rewrites: Rewrites,
    context: str,
) -> Mapping[str, LayerPlan]:
    """The layers that may be quantised, each measured alone, then together."""
    path, judge, findings = stage.model.model.path, _judge(stage), Findings(stage.config.findings)
    with stage.progress.stage("measure layers alone") as update:
        found = measure_sensitivity(path, stage.sha256, faster, rewrites, judge, context, findings, update)
    gains = [gain for name in faster for gain in saved[name]]
    usable = [choice_from_finding(item, gain) for item, gain in zip(found, gains, strict=True) if not item.problem]
    if not usable:
        raise KilnError(f"no layer can be quantised: {found[0].problem}")
    allowed = _allowed(stage.model.decoder is not None, (plan for plans in faster.values() for plan in plans))

    def measure(plan: PrecisionPlan) -> Mapping[str, Difference]:
        with candidate(path, plan, rewrites) as made:
            return judge(made)

    with stage.progress.stage("choose layers"):
        limits = dict.fromkeys(usable[0].cost, allowed)
        return choose(stage.sha256, usable, limits, measure).plan.layers


def _allowed(is_decoder: bool, plans: Iterable[LayerPlan], limits: Path | None = None) -> float:
    """What a plan may cost by the gate's conventions for its coarsest scheme: KL divergence, or squared error.

    A user's limit of perplexity counts instead.
    """
    schemes = {plan.scheme for plan in plans}
    if is_decoder:
        given = {} if limits is None else limits_from_toml(limits).limits
        return math.log1p(given.get("perplexity", max(PERPLEXITY[scheme] for scheme in schemes)))
    return 2 * (1 - min(COSINE[scheme] for scheme in schemes))


def _phases(stage: _Stage) -> list[Phase]:
    if stage.model.decoder is None:
        return [Phase("call", 1)]
    return [Phase("prefill", 1, _PROMPT), Phase("decode", _ANSWER, 1)]


def _shapes(stage: _Stage) -> dict[str, tuple[int, ...]]:
    """Of every layer's activation in one call, for models whose layers are not all fed by rows."""
    if stage.model.decoder is not None:
        return {}
    names = list(dict.fromkeys(layer.activation for layer in stage.layers))
    sample = stage.data().samples[0]
    session = ObservingSession(stage.model, names, longest=sample.length, chunk=sample.length, threads=stage.threads)
    found = {name: values.shape for tensors in session.run(sample) for name, values in tensors.items()}
    return {layer.name: found[layer.activation] for layer in stage.layers}


def _judge(stage: _Stage, count: int = _JUDGED) -> Judge:
    """On a few samples of every stratum."""
    data, model = stage.data(), stage.model
    chosen = [
        sample
        for name in data.strata.names
        for sample in [s for s in data.samples if data.stratum_of(s) == name][:count]
    ]
    if model.decoder is None:
        samples = [(data.stratum_of(sample), sample.read()) for sample in chosen]
        return PlainJudge(model.model.path, model.plugins, samples, threads=stage.threads)
    texts = []
    for sample in chosen:
        tokens = tuple(sample.read()[TOKENS].tolist())
        step = max(1, len(tokens) // _POSITIONS)
        texts.append(Text(data.stratum_of(sample), tokens, tuple(range(len(tokens) - 1, -1, -step))[::-1]))
    return DecoderJudge(model.model.path, model.decoder, model.plugins, texts, stage.threads)


def _context(stage: _Stage, table: CalibrationTable | None) -> str:
    facts = (
        stage.data().sha256,
        "" if table is None else hashlib.sha256(table.to_json().encode()).hexdigest(),
        stage.target.backend,
        version("onnxruntime"),
    )
    return " ".join(facts)


def _origin(stage: _Stage, table: CalibrationTable | None) -> dict[str, str]:
    found = {"quant": stage.config.quant, "search": stage.config.search}
    if table is not None:
        found["calibration"] = hashlib.sha256(table.to_json().encode()).hexdigest()
        found["data"] = table.data_sha256
    return found
