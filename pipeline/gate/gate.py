"""The accuracy gate: holds a candidate against the reference in three dimensions, on every length class by itself.

Numeric (largest error, cosine, SNR at the output and by layer), distribution (perplexity, KL divergence, first choices,
embeddings, a task) and generation (agreement, repetition, drift). Limits are `pipeline.gate.limits`. A candidate that
fails gets advice which layers to keep in float, tried out where the caller can rebuild it. Publishes nothing.
"""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from pipeline.compare.comparison import Comparable, subject_from
from pipeline.compare.machine import machine_description
from pipeline.compare.report import Check, check_from_limit
from pipeline.compare.subjects import DecoderSubject, PlainSubject
from pipeline.gate.config import GateConfig
from pipeline.gate.decoders import DecoderMeasurer
from pipeline.gate.found import Found, Measured, Measurer, Noise
from pipeline.gate.keep import advise, rank_layers
from pipeline.gate.limits import METRICS, Basis, Dimension, GateLimits, limit_of
from pipeline.gate.material import DecoderData, GateData, PlainData
from pipeline.gate.plain_models import PlainMeasurer
from pipeline.gate.report import GateCheck, GateReport, KeepAdvice, StratumReport, Trial
from pipeline.progress import Progress
from plugins.errors import KilnError

Rebuild = Callable[[Sequence[str]], Path]
"""Makes the candidate anew with these layers in float, and gives its path."""
_ALL: tuple[Dimension, ...] = ("numeric", "distribution", "generation")


def run_gate(
    reference: Comparable,
    candidate: Comparable,
    data: GateData,
    limits: GateLimits,
    config: GateConfig,
    progress: Progress,
    rebuild: Rebuild | None = None,
) -> GateReport:
    """Judge a candidate. Raises KilnError for what cannot be judged, such as NaN logits or data of another model.

    Each side is a bundle, an ONNX file, a torch model, or an opened subject of `pipeline.compare`, which stays open.
    """
    names = [stratum.name for stratum in data.strata]
    if isinstance(data, PlainData) and data.task is not None:
        names.append(data.task.name)
    limits.require_strata(names)
    Basis(config.schemes, isinstance(data, DecoderData))  # refuses an unknown scheme before anything runs
    with ExitStack() as stack:
        with progress.stage("open the reference"):
            subject = subject_from(reference, config.threads, config.generation.running)
        if subject is not reference:
            stack.enter_context(closing(subject))
        measurer: Measurer
        if isinstance(subject, DecoderSubject) and isinstance(data, DecoderData):
            measurer = DecoderMeasurer(subject, data, config, progress)
        elif isinstance(subject, PlainSubject) and isinstance(data, PlainData):
            measurer = PlainMeasurer(subject, data, config, progress)
        else:
            kinds = ("a model without a KV cache", "a language model")
            raise KilnError(
                f"{subject.side.name} is {kinds[isinstance(subject, DecoderSubject)]}, the data is for "
                f"{kinds[isinstance(data, DecoderData)]}; give data of the same kind"
            )
        return _Gate(measurer, limits, config, progress).judge(candidate, rebuild)


class _Gate:
    def __init__(self, measurer: Measurer, limits: GateLimits, config: GateConfig, progress: Progress) -> None:
        self._measurer, self._limits, self._config, self._progress = measurer, limits, config, progress
        self._noise: Noise | None = None

    def judge(self, candidate: Comparable, rebuild: Rebuild | None) -> GateReport:
        subject, measured = self._measurer.measure(candidate, _ALL, self._config.layers)
        self._noise = self._measurer.noise() if self._config.noise else None
        checks = self._checks(measured)
        advice = self._advice(measured, checks, rebuild) if any(check.failed for check in checks) else None
        return GateReport(
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            schemes=self._config.schemes,
            reference=self._measurer.reference.side,
            candidate=subject.side,
            machine=machine_description(),
            settings=self._measurer.settings(),
            checks=checks,
            strata=tuple(self._stratum(found) for found in measured.strata),
            noise_origin=self._noise.origin if self._noise else "not measured",
            unmatched_layers=measured.unmatched,
            advice=advice,
        )

    def _checks(self, measured: Measured) -> tuple[GateCheck, ...]:
        """By dimension, then by stratum."""
        made = [self._check(found, metric) for found in measured.strata for metric in METRICS if metric in found.values]
        return tuple(sorted(made, key=lambda check: _ALL.index(check.dimension)))

    def _check(self, found: Found, name: str) -> GateCheck:
        metric, value, note = METRICS[name], found.values[name], found.notes.get(name, "")
        limit = limit_of(name, found.name, self._limits, self._basis(found))
        if limit is None:
            check = Check(name, metric.title, value, metric.direction, 0.0, "", False, note)
            return GateCheck(metric.dimension, found.name, check, judged=False)
        check = check_from_limit(name, metric.title, value, metric.direction, limit, note)
        return GateCheck(metric.dimension, found.name, check)

    def _basis(self, found: Found) -> Basis:
        noise = self._noise.strata.get(found.name) if self._noise else None
        return Basis(
            schemes=self._config.schemes,
            is_decoder=isinstance(self._measurer, DecoderMeasurer),
            floor={**({} if noise is None else noise.floor), **found.scatter},
            floor_origin=self._noise.origin if self._noise else "",
            resolution=found.resolution,
            greedy_tokens=self._config.generation.greedy,
        )

    def _stratum(self, found: Found) -> StratumReport:
        noise = self._noise.strata.get(found.name) if self._noise else None
        reordered = self._noise.reordered.get(found.name, {}) if self._noise else {}
        return StratumReport(
            name=found.name,
            description=found.description,
            facts=found.facts,
            noise={} if noise is None else noise.values,
            reordered=reordered,
            thousands=found.thousands,
            curve=found.curve,
            layers=found.layers,
            prompts=found.prompts,
        )

    def _advice(self, measured: Measured, checks: Sequence[GateCheck], rebuild: Rebuild | None) -> KeepAdvice:
        failing = {check.stratum for check in checks if check.failed}
        rows = [found.layers for found in measured.strata if found.layers and found.name in failing]
        ranking = rank_layers(rows or [found.layers for found in measured.strata])
        if rebuild is None:
            return advise(ranking, None, 0)
        failed = [check for check in checks if check.failed]
        dimensions = {"numeric", "distribution", *(check.dimension for check in failed)}
        layers = any(check.check.name == "layer_snr_db" for check in failed)
        return advise(ranking, lambda keep: self._trial(keep, rebuild, dimensions, layers), self._config.max_trials)

    def _trial(self, keep: Sequence[str], rebuild: Rebuild, dimensions: Collection[Dimension], layers: bool) -> Trial:
        self._progress.note(f"trying with {len(keep)} layers in float: {', '.join(keep)}")
        _, measured = self._measurer.measure(rebuild(keep), dimensions, layers)
        failed = [f"{check.check.name} on {check.stratum}" for check in self._checks(measured) if check.failed]
        self._progress.note(f"fails: {', '.join(failed)}" if failed else "passes")
        return Trial(tuple(keep), tuple(failed))
