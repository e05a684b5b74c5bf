"""The stage of a build that quantises: calibrate where the schemes need it, plan, and give the passes that do it.

Nothing is written but what the caller names. The verdict on the result is the gate's (`pipeline.quantize.judging`).
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from numpy.typing import NDArray

from engines.runtime.tokenizer import Tokenizer
from passes.base import Pass
from passes.onnx_model import OnnxModel
from passes.quantization.cuda_form import SimulateCuda
from passes.quantization.plan import LayerPlan, PrecisionPlan, plan_from_toml
from passes.quantization.rescale import Rescaled
from passes.quantization.rewrite import check_plan, kernels_of, quantising_passes
from passes.quantization.table import CalibrationTable
from passes.standard import PassTarget
from pipeline.calibration.running import ObservingSession
from pipeline.calibration.samples import TOKENS
from pipeline.calibration.subject import CalibrationModel
from pipeline.gate.limits import COSINE, PERPLEXITY, limits_from_toml
from pipeline.progress import Progress
from pipeline.quantize.candidates import Rewrites, candidate
from pipeline.quantize.choices import Choices, choices_for
from pipeline.quantize.choose import choice_from_finding, choose, cost_of
from pipeline.quantize.config import QuantizeConfig
from pipeline.quantize.judge import DecoderJudge, Difference, Judge, PlainJudge, Text
from pipeline.quantize.latency import LayerClock, Phase
from pipeline.quantize.sensitivity import Findings, measure_sensitivity
from pipeline.quantize.sku_speed import SkuSpeed
from pipeline.quantize.smoothing import layers_to_smooth, smoothed
from pipeline.quantize.state import Quantisation, Stage
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


def quantisation_for(
    model: OnnxModel,
    plugins: Sequence[Path],
    tokenizer: Tokenizer | None,
    target: PassTarget,
    config: QuantizeConfig,
    folder: Path,
    progress: Progress,
    threads: int | None = None,
    speed: SkuSpeed | None = None,
) -> Quantisation:
    """Plan the quantisation of a graph that the float passes have been over. `folder` is for temporary files.

    `speed` tells of a GPU what this machine cannot measure; a graph for one is still in FP32.
    Raises KilnError for data, tables and plans that do not suit the model, and where nothing can be gained.
    """
    limit = model.decoder.max_context if model.decoder else (tokenizer.max_length if tokenizer else None)
    subject = CalibrationModel(model, tuple(plugins), tokenizer, limit)
    stage = Stage(subject, target, config, folder, threads, progress, speed)
    if config.plan is not None:
        return _given(stage, plan_from_toml(config.plan))
    choices = choices_for(stage.layers, target, config)
    searched = layers_to_smooth(config, choices, kernels_of(target))
    table = stage.table([plan for plans in choices.plans.values() for plan in plans], bool(searched))
    if searched and table is not None:
        observe = config.calibration.observe
        choices = smoothed(choices, searched, subject, stage.data(), table, kernels_of(target), observe, progress)
    moments = stage.moments(choices.plans)
    plan = _planned(stage, choices, table, moments)
    plan = replace(plan, kv=config.kv, origin=_origin(stage, table))
    return stage.result(plan, table, moments)


def _given(stage: Stage, plan: PrecisionPlan) -> Quantisation:
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
    stage: Stage, choices: Choices, table: CalibrationTable | None, moments: Mapping[str, NDArray]
) -> PrecisionPlan:
    def rewrites(plan: PrecisionPlan) -> list[Pass]:
        rescaled = Rescaled()
        passes = quantising_passes(plan, table, moments, stage.target, rescaled)
        return passes if stage.speed is None else [*passes, SimulateCuda(plan, moments, rescaled)]

    if stage.speed is not None:
        choices = _with_kernel_rows(stage, choices)
    planned = {name: LayerPlan(reason=reason) for name, reason in choices.left.items()}
    if stage.config.search in ("all", "accuracy") or not choices.plans:
        planned |= {name: plans[0] for name, plans in choices.plans.items()}
        plan = PrecisionPlan(stage.sha256, {layer.name: planned[layer.name] for layer in stage.layers})
        return _accurate(stage, plan, rewrites) if stage.config.search == "accuracy" and plan.quantised else plan
    if stage.speed is None:
        saved = _with_neighbours(stage, choices, _saved(stage, choices, rewrites), rewrites)
    else:
        saved = {name: [_saved_there(stage, name, plan) for plan in plans] for name, plans in choices.plans.items()}
    faster = {name: plans for name, plans in choices.plans.items() if max(saved[name]) > 0}
    if not faster:
        raise KilnError(
            f"none of the {len(choices.plans)} layers is faster as {stage.config.quant} on "
            f"{stage.speed.name if stage.speed else 'this machine'}; leave the model as it is, try another --quant, or "
            "quantise them all the same with --search all"
        )
    planned |= {name: _slower(stage, name, plans[0]) for name, plans in choices.plans.items() if name not in faster}
    if stage.config.search == "latency":
        planned |= {
            name: replace(plans[0], reason=plans[0].reason or f"saves {saved[name][0] * 1e3:.3g} ms")
            for name, plans in faster.items()
        }
    else:
        planned |= _within_limits(stage, faster, saved, rewrites, _context(stage, table))
    return PrecisionPlan(stage.sha256, {layer.name: planned[layer.name] for layer in stage.layers})


def _with_kernel_rows(stage: Stage, choices: Choices) -> Choices:
    """For a GPU: what was measured there says by which kernels a layer is multiplied, and the reason where."""

    def chosen(name: str, plan: LayerPlan) -> LayerPlan:
        speed = stage.speed_of(name, plan)
        return replace(plan, kernel_rows=speed.kernel_rows, reason=speed.origin)

    return replace(choices, plans={n: tuple(chosen(n, plan) for plan in plans) for n, plans in choices.plans.items()})


def _saved_there(stage: Stage, name: str, plan: LayerPlan) -> float:
    """Seconds of a decode step on a GPU; none where any batch is slower."""
    speed = stage.speed_of(name, plan)
    return speed.saved if speed.wins else min(speed.saved, 0.0)


def _slower(stage: Stage, name: str, plan: LayerPlan) -> LayerPlan:
    return LayerPlan(reason="not faster here" if stage.speed is None else f"not faster at every batch: {plan.reason}")


def _saved(stage: Stage, choices: Choices, rewrites: Rewrites) -> dict[str, list[float]]:
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
    stage: Stage, choices: Choices, saved: Mapping[str, list[float]], rewrites: Rewrites
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


def _accurate(stage: Stage, plan: PrecisionPlan, rewrites: Rewrites) -> PrecisionPlan:
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
    stage: Stage,
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


def _phases(stage: Stage) -> list[Phase]:
    if stage.model.decoder is None:
        return [Phase("call", 1)]
    return [Phase("prefill", 1, _PROMPT), Phase("decode", _ANSWER, 1)]


def _shapes(stage: Stage) -> dict[str, tuple[int, ...]]:
    """Of every layer's activation in one call, for models whose layers are not all fed by rows."""
    if stage.model.decoder is not None:
        return {}
    names = list(dict.fromkeys(layer.activation for layer in stage.layers))
    sample = stage.data().samples[0]
    session = ObservingSession(stage.model, names, longest=sample.length, chunk=sample.length, threads=stage.threads)
    found = {name: values.shape for tensors in session.run(sample) for name, values in tensors.items()}
    return {layer.name: found[layer.activation] for layer in stage.layers}


def _judge(stage: Stage, count: int = _JUDGED) -> Judge:
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


def _context(stage: Stage, table: CalibrationTable | None) -> str:
    facts = (
        stage.data().sha256,
        "" if table is None else hashlib.sha256(table.to_json().encode()).hexdigest(),
        stage.target.backend,
        version("onnxruntime"),
    )
    return " ".join(facts)


def _origin(stage: Stage, table: CalibrationTable | None) -> dict[str, str]:
    found = {"quant": stage.config.quant, "search": stage.config.search}
    if table is not None:
        found["calibration"] = hashlib.sha256(table.to_json().encode()).hexdigest()
        found["data"] = table.data_sha256
    return found
