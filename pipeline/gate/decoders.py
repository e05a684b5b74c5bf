"""Measures language models: layers, texts and continuations of a candidate, and of the accepted change."""

from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

from pipeline.compare.comparison import Comparable, subject_from
from pipeline.compare.report import number
from pipeline.compare.subjects import DecoderSubject, Subject
from pipeline.gate.config import GateConfig
from pipeline.gate.found import Found, Measured, Noise
from pipeline.gate.generation import (
    Job,
    Written,
    WrittenRow,
    compare_written,
    hazard_of_rows,
    jobs_from_data,
    scatter_of_rows,
    values_of_rows,
    write,
)
from pipeline.gate.graphs import GraphFile, graph_file_of, variant, with_rounded_cache
from pipeline.gate.layers import LayerRow, decoder_layers
from pipeline.gate.limits import Dimension
from pipeline.gate.material import DecoderData, TextStratum
from pipeline.gate.texts import score_texts
from pipeline.progress import Progress
from plugins.errors import KilnError

ROUNDED = "a KV cache rounded to BF16"
REORDERED = "other sums: ONNX Runtime's rewrites off, steps half as long"
CHUNKED = "other sums: steps half as long"
_NOISE_TOKENS = 1024
"""Of a text: what the noise floor's layers are measured on."""


class DecoderMeasurer:
    """Owns the reference's continuations, which are made once; the opened reference stays its caller's."""

    def __init__(self, reference: DecoderSubject, data: DecoderData, config: GateConfig, progress: Progress) -> None:
        self.reference = reference
        self._data, self._config, self._progress = data, config, progress
        self._graph = config.reference_graph or graph_file_of(reference)
        data.check(reference.vocab_size, reference.max_context)
        self._jobs = jobs_from_data(data, config.generation, reference.max_context)
        self._written: list[Written] | None = None

    def measure(
        self, candidate: Comparable, dimensions: Collection[Dimension], layers: bool
    ) -> tuple[Subject, Measured]:
        with ExitStack() as stack:
            with self._progress.stage("open the candidate"):
                subject = subject_from(candidate, self._config.threads, self._config.generation.running)
            if subject is not candidate:
                stack.enter_context(closing(subject))
            if not isinstance(subject, DecoderSubject):
                raise KilnError(f"{subject.side.name} has no KV cache, the reference has one; give two of a kind")
            if subject.vocab_size != self.reference.vocab_size:
                raise KilnError(
                    f"{subject.side.name} has a vocabulary of {subject.vocab_size} tokens, the reference of "
                    f"{self.reference.vocab_size}; they are not the same model"
                )
            self._data.check(subject.vocab_size, subject.max_context)
            graph = self._config.candidate_graph or graph_file_of(subject)
            return subject, self._measure(subject, graph if layers else None, dimensions, self._data.strata)

    def noise(self) -> Noise | None:
        if self._graph is None:
            return self._noise_of_chunks()
        assert self._graph.decoder is not None
        reordered = self._reordered(self._graph)
        if self._graph.decoder.kv.dtype != "float32":
            return Noise(REORDERED, {found.name: found for found in reordered.strata})
        with (
            with_rounded_cache(self._graph) as rounded,
            variant(
                rounded,
                self.reference,
                ROUNDED,
                optimized=True,
                threads=self._config.threads,
                max_running=self._config.generation.running,
            ) as subject,
        ):
            assert isinstance(subject, DecoderSubject)
            graph = rounded if self._config.layers else None
            strata = _first_texts(self._data)
            layers, _ = self._layers(graph, strata, ROUNDED, _NOISE_TOKENS)
            with self._progress.stage(f"score {ROUNDED}"):
                found = [self._score(subject, stratum, layers.get(stratum.name, ())) for stratum in strata]
            if self._jobs:
                jobs = [replace(job, tokens=self._config.generation.greedy, long=False) for job in self._jobs]
                rows = self._generate(subject, ROUNDED, jobs)
                found = [_with_hazard(part, _of(part, rows)) for part in found]
        return Noise(ROUNDED, {x.name: x for x in found}, {x.name: x.values for x in reordered.strata})

    def settings(self) -> dict[str, str]:
        generation = self._config.generation
        lengths = "; ".join(
            f"{stratum.name}: {len(stratum.texts)} of up to {stratum.longest} tokens" for stratum in self._data.strata
        )
        return {
            "texts": f"{self._data.origin}; {lengths}",
            "generation": f"{len(self._jobs)} prompts of {_lengths(self._jobs)} tokens, {generation.greedy} greedy "
            f"tokens after each, {generation.continuation} after {sum(job.long for job in self._jobs)} of them, up to "
            f"{generation.running} at a time; repetition by {generation.ngram}-grams",
        }

    def _measure(
        self,
        subject: DecoderSubject,
        graph: GraphFile | None,
        dimensions: Collection[Dimension],
        strata: Sequence[TextStratum],
        name: str = "the candidate",
    ) -> Measured:
        layers, unmatched = self._layers(graph, strata, name) if "numeric" in dimensions else ({}, ())
        with self._progress.stage(f"score {name}"):
            found = [self._score(subject, stratum, layers.get(stratum.name, ())) for stratum in strata]
        if "generation" not in dimensions or not self._jobs:
            return Measured(tuple(found), unmatched)
        rows = self._generate(subject, name, self._jobs)
        return Measured(tuple(_with_rows(part, _of(part, rows), rows) for part in found), unmatched)

    def _layers(
        self, graph: GraphFile | None, strata: Sequence[TextStratum], name: str, tokens: int | None = None
    ) -> tuple[dict[str, tuple[LayerRow, ...]], tuple[str, ...]]:
        """Rows by stratum, of the first `tokens` of its first text."""
        found: dict[str, tuple[LayerRow, ...]] = {}
        missing: tuple[str, ...] = ()
        if graph is None or self._graph is None:
            return found, missing
        with self._progress.stage(f"layers of {name}"):
            for stratum in strata:
                rows, matching = decoder_layers(
                    self._graph, graph, [stratum.texts[0][:tokens]], self._config.layer_chunk, self._config.threads
                )
                found[stratum.name], missing = tuple(rows), matching.missing
        return found, missing

    def _score(self, subject: DecoderSubject, stratum: TextStratum, layers: tuple[LayerRow, ...]) -> Found:
        figures = score_texts(self.reference, subject, stratum.texts, self._config.chunk)
        values, notes = dict(figures.values), {}
        if layers:
            worst = min(layers, key=lambda row: row.snr_db)
            values["layer_snr_db"], notes["layer_snr_db"] = worst.snr_db, worst.name
        notes["perplexity"] = f"{number(figures.perplexity_reference)}, then {number(figures.perplexity_candidate)}"
        return Found(
            name=stratum.name,
            description=f"{len(stratum.texts)} texts of up to {stratum.longest} tokens, {stratum.tokens} in all",
            values=values,
            notes=notes,
            events=figures.events,
            facts={
                "perplexity, reference": figures.perplexity_reference,
                "perplexity, candidate": figures.perplexity_candidate,
            },
            thousands=figures.thousands,
            curve=figures.curve,
            layers=layers,
        )

    def _generate(self, subject: DecoderSubject, name: str, jobs: Sequence[Job]) -> list[WrittenRow]:
        chunk = self._config.chunk
        if self._written is None:
            with self._progress.stage("continuations, reference"):
                self._written = write(self.reference, self.reference, self._jobs, chunk)
        with self._progress.stage(f"continuations, {name}"):
            written = write(subject, self.reference, jobs, chunk)
        return compare_written(jobs, self._written, written, self._config.generation)

    def _reordered(self, graph: GraphFile) -> Measured:
        """A short look at what another order of sums does."""
        threads = self._config.threads
        strata = _first_texts(self._data)[:1] if graph.decoder and graph.decoder.kv.dtype == "float32" else None
        with (
            self._progress.stage("noise floor, other sums"),
            variant(graph, self.reference, REORDERED, optimized=False, threads=threads) as subject,
        ):
            assert isinstance(subject, DecoderSubject)
            return Measured(tuple(self._halved(subject, stratum) for stratum in strata or _first_texts(self._data)))

    def _noise_of_chunks(self) -> Noise:
        """Of a torch model, whose only other order of sums is another number of tokens a step."""
        with self._progress.stage("noise floor, other sums"):
            found = [self._halved(self.reference, stratum) for stratum in _first_texts(self._data)]
        return Noise(CHUNKED, {part.name: part for part in found})

    def _halved(self, subject: DecoderSubject, stratum: TextStratum) -> Found:
        chunk = self._config.chunk
        figures = score_texts(self.reference, subject, stratum.texts, chunk, max(1, chunk // 2))
        return Found(stratum.name, "", figures.values, events=figures.events)


def _first_texts(data: DecoderData) -> tuple[TextStratum, ...]:
    """The same with one text a stratum, the longest: the noise floor needs no more."""
    return tuple(replace(stratum, texts=(max(stratum.texts, key=len),)) for stratum in data.strata)


def _of(found: Found, rows: Sequence[WrittenRow]) -> list[WrittenRow]:
    return [row for row in rows if row.stratum == found.name]


def _with_rows(found: Found, rows: Sequence[WrittenRow], everywhere: Sequence[WrittenRow]) -> Found:
    if not rows:
        return found
    values = {**found.values, **values_of_rows(rows)}
    return replace(found, values=values, scatter=scatter_of_rows(rows, everywhere), prompts=tuple(rows))


def _with_hazard(found: Found, rows: Sequence[WrittenRow]) -> Found:
    if not rows:
        return found
    events = {**found.events, "greedy_agreement": hazard_of_rows(rows)}
    return replace(found, values={**found.values, **values_of_rows(rows)}, events=events)


def _lengths(jobs: Sequence[Job]) -> str:
    lengths = sorted({len(job.prompt.token_ids) for job in jobs})
    return f"{lengths[0]} to {lengths[-1]}" if lengths else "no"
