"""Measures classifiers and encoders: a candidate's layers, outputs and downstream task, and the accepted change."""

import itertools
from collections.abc import Collection
from contextlib import ExitStack, closing

from pipeline.compare.comparison import Comparable, subject_from
from pipeline.compare.inputs import merged_inputs
from pipeline.compare.subjects import PlainSubject, Subject
from pipeline.gate.config import GateConfig
from pipeline.gate.found import Found, Measured, Noise
from pipeline.gate.graphs import GraphFile, graph_file_of, variant
from pipeline.gate.layers import LayerRow, plain_layers
from pipeline.gate.limits import Dimension
from pipeline.gate.material import PlainData, PlainStratum
from pipeline.gate.plain import measure_samples, measure_task
from pipeline.io_layout import permutations_from_path, to_model
from pipeline.progress import Progress
from plugins.errors import KilnError

REORDERED = "other sums: ONNX Runtime's rewrites off, one thread"
_NOISE_SAMPLES = 4
"""Of a stratum: the noise floor needs no more."""


class PlainMeasurer:
    """The opened reference stays its caller's."""

    def __init__(self, reference: PlainSubject, data: PlainData, config: GateConfig, progress: Progress) -> None:
        self.reference = reference
        self._data, self._config, self._progress = data, config, progress
        self._graph = config.reference_graph or graph_file_of(reference)

    def measure(
        self, candidate: Comparable, dimensions: Collection[Dimension], layers: bool
    ) -> tuple[Subject, Measured]:
        with ExitStack() as stack:
            with self._progress.stage("open the candidate"):
                subject = subject_from(candidate, self._config.threads)
            if subject is not candidate:
                stack.enter_context(closing(subject))
            if not isinstance(subject, PlainSubject):
                raise KilnError(f"{subject.side.name} has a KV cache, the reference has none; give two of a kind")
            merged_inputs(self.reference.inputs, subject.inputs)
            graph = self._config.candidate_graph or graph_file_of(subject)
            return subject, self._measure(subject, graph if layers else None)

    def noise(self) -> Noise | None:
        if self._graph is None:
            return None
        with (
            self._progress.stage("noise floor"),
            variant(self._graph, self.reference, REORDERED, optimized=False, threads=1) as subject,
        ):
            assert isinstance(subject, PlainSubject)
            found = {}
            for stratum in self._data.strata:
                samples = itertools.islice(stratum.samples, _NOISE_SAMPLES)
                figures = measure_samples(self.reference, subject, self._data, samples)
                found[stratum.name] = Found(stratum.name, "", figures.values)
        return Noise(REORDERED, found)

    def settings(self) -> dict[str, str]:
        task = self._data.task
        told = {} if task is None else {"task": f"{task.name}, trained on {task.train_share:.0%}, seed {task.seed}"}
        return {"inputs": self._data.origin, **told, **self._data.settings}

    def _measure(self, subject: PlainSubject, graph: GraphFile | None) -> Measured:
        missing: tuple[str, ...] = ()
        found = []
        for stratum in self._data.strata:
            layers: tuple[LayerRow, ...] = ()
            if graph is not None and self._graph is not None:
                with self._progress.stage(f"layers, {stratum.name}"):
                    layers, missing = self._layers(self._graph, graph, stratum)
            with self._progress.stage(f"outputs, {stratum.name}"):
                figures = measure_samples(self.reference, subject, self._data, stratum.samples)
            values, notes = dict(figures.values), {}
            if layers:
                worst = min(layers, key=lambda row: row.snr_db)
                values["layer_snr_db"], notes["layer_snr_db"] = worst.snr_db, worst.name
            found.append(Found(stratum.name, "", values, notes, figures.resolution, facts=figures.facts, layers=layers))
        if self._data.task is not None:
            with self._progress.stage("downstream task"):
                task = measure_task(self.reference, subject, self._data, self._data.task)
            found.append(Found(self._data.task.name, "", task.values, {}, task.resolution, facts=task.facts))
        return Measured(tuple(found), missing)

    def _layers(
        self, ours: GraphFile, theirs: GraphFile, stratum: PlainStratum
    ) -> tuple[tuple[LayerRow, ...], tuple[str, ...]]:
        """Of some samples; layers are compared in the layout of the reference's graph."""
        permutations = permutations_from_path(ours.path)
        feeds = (to_model(sample.feeds, permutations) for sample in itertools.islice(stratum.samples, _NOISE_SAMPLES))
        rows, matching = plain_layers(ours, theirs, feeds, self._config.threads)
        return tuple(rows), matching.missing
