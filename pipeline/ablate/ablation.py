"""`kiln ablate`: builds and measures a model with one switch at a time, and with all of them one after the other.

A variant that cannot be built or run says why and the others go on. Everything goes into the ledger: builds,
comparisons of each bundle with the baseline's, and one entry for each variant.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from engines.bundle import EngineBundle
from passes.onnx_model import decoder_from_structure, load_structure
from pipeline.ablate.measuring import Measured, measure
from pipeline.ablate.variants import (
    DECODER_SWITCHES,
    PLAIN_SWITCHES,
    AblateConfig,
    Variant,
    build_config,
    variants,
)
from pipeline.build import build
from pipeline.compare import CompareConfig, compare
from pipeline.compare.report import ComparisonReport
from pipeline.ledger.entry import Entry, FigureValues
from pipeline.ledger.records import entry_from_build, entry_from_comparison, facts_from_manifest, here
from pipeline.load import describe
from pipeline.progress import Progress
from pipeline.source import resolve_source
from plugins.errors import KilnError

Record = Callable[[Callable[[], Entry]], Entry | None]
"""Adds an entry to the ledger; None where that failed or is not wanted."""


@dataclass(frozen=True)
class Outcome:
    """One variant: what was measured, how far its outputs are from the baseline's, or why it is not there."""

    variant: Variant
    measured: Measured | None = None
    comparison: ComparisonReport | None = None
    failure: str = ""

    @property
    def error(self) -> tuple[str, float] | None:
        """Name and value of the figure that says most about accuracy; None for the baseline's own bundle."""
        if self.comparison is None:
            return None
        checks = [check for check in self.comparison.checks if check.direction == "at most"]
        chosen = next((check for check in checks if check.name == "kl_mean"), None)
        chosen = chosen or max(checks, key=lambda check: check.value / check.limit if check.limit else check.value)
        return chosen.title, chosen.value


@dataclass(frozen=True)
class Ablation:
    """Everything that was found."""

    model: str
    switches: tuple[str, ...]
    config: AblateConfig
    outcomes: tuple[Outcome, ...]


@dataclass
class _Bundles:
    """Bundles by what decides them; each is built once, when it is first needed."""

    model: str
    decoder: bool
    folder: Path
    config: AblateConfig
    record: Record
    progress: Progress
    built: dict[frozenset[str], EngineBundle | KilnError]
    comparisons: dict[frozenset[str], ComparisonReport]

    def get(self, wanted: frozenset[str]) -> EngineBundle:
        if wanted not in self.built:
            self.built[wanted] = self._build(wanted)
        found = self.built[wanted]
        if isinstance(found, KilnError):
            raise found
        return found

    def comparison(self, wanted: frozenset[str]) -> ComparisonReport | None:
        """With the baseline; None for that itself."""
        if not wanted:
            return None
        if wanted not in self.comparisons:
            baseline, other = self.built[frozenset()], self.built[wanted]
            assert isinstance(baseline, EngineBundle)
            assert isinstance(other, EngineBundle)
            settings = CompareConfig(text_tokens=self.config.compared_tokens, tokens=16, threads=self.config.threads)
            report = compare(baseline.path, other.path, settings, self.progress)
            self.comparisons[wanted] = report
            self.record(lambda: entry_from_comparison(report))
        return self.comparisons[wanted]

    def _build(self, wanted: frozenset[str]) -> EngineBundle | KilnError:
        name = "-".join(sorted(wanted)) or "baseline"
        self.progress.note(f"build: {name}")
        clock = Progress(self.progress.console)
        try:
            options = build_config(self.config, wanted, self.decoder, self.folder / name)
            built = build(self.model, ["cpu"], options, clock)[0]
        except KilnError as error:
            return error
        bundle = built.bundle
        self.record(lambda: entry_from_build(bundle, clock.seconds))
        return bundle


def ablate(model: str, config: AblateConfig, record: Record, progress: Progress) -> Ablation:
    """Raises KilnError where not even the baseline can be built and measured."""
    decoder = _is_decoder(model)
    switches = DECODER_SWITCHES if decoder else PLAIN_SWITCHES
    with _folder(config.out) as folder:
        bundles = _Bundles(model, decoder, folder, config, record, progress, {}, {})
        outcomes: list[Outcome] = []
        entries: list[Entry | None] = []
        for variant in variants(switches):
            outcome = _outcome(bundles, variant, switches)
            if variant.parent is None and outcome.measured is None:
                raise KilnError(f"the baseline of {model} cannot be measured: {outcome.failure}")
            outcomes.append(outcome)
            parent = None if variant.parent is None else entries[variant.parent]
            entries.append(_recorded(outcome, parent, bundles, switches))
    return Ablation(model, switches, config, tuple(outcomes))


def _is_decoder(model: str) -> bool:
    source = resolve_source(model)
    description = describe(source)
    if description is not None:
        return description.is_decoder
    if source.kind != "onnx":
        return False
    assert source.path is not None
    return decoder_from_structure(source.path, load_structure(source.path)) is not None


def _outcome(bundles: _Bundles, variant: Variant, switches: tuple[str, ...]) -> Outcome:
    progress = bundles.progress
    try:
        bundle = bundles.get(variant.bundle)
        with progress.stage(f"measure: {variant.title(switches)}"):
            measured = measure(bundle.path, variant.on, bundles.config)
        comparison = bundles.comparison(variant.bundle)
    except KilnError as error:
        progress.note(f"{variant.title(switches)}: {error}")
        return Outcome(variant, failure=str(error))
    return Outcome(variant, measured, comparison)


def _recorded(outcome: Outcome, parent: Entry | None, bundles: _Bundles, switches: tuple[str, ...]) -> Entry | None:
    if outcome.measured is None:
        return None
    bundle = bundles.get(outcome.variant.bundle)
    entry = entry_from_outcome(outcome, bundle, bundles.config, switches)
    if parent is not None:
        entry = replace(entry, parent=parent.number, change=outcome.variant.change)
    return bundles.record(lambda: entry)


def entry_from_outcome(
    outcome: Outcome, bundle: EngineBundle, config: AblateConfig, switches: tuple[str, ...]
) -> Entry:
    """One variant for the ledger."""
    measured = outcome.measured
    assert measured is not None
    figures = [
        FigureValues("ablation/rate", "1/s", measured.rates, True),
        FigureValues("ablation/latency", "s", measured.latencies, False),
    ]
    if measured.peak is not None:
        figures.append(FigureValues("ablation/peak_memory", "bytes", (measured.peak,), False))
    if outcome.comparison is not None:
        figures += entry_from_comparison(outcome.comparison).figures
    workload = {name: str(getattr(config, name)) for name in ("requests", "prompt", "output", "repetitions")}
    return Entry(
        kind="ablation",
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        name=bundle.manifest.name,
        subject=bundle.sha256,
        path=str(bundle.path),
        facts={
            **facts_from_manifest(bundle.manifest),
            **here(),
            **{f"ablate.{switch}": "on" if switch in outcome.variant.on else "off" for switch in switches},
            **{f"ablate.{name}": text for name, text in workload.items()},
        },
        figures=tuple(figures),
        document={"on": sorted(outcome.variant.on), "error": outcome.error},
        digests={"bundle": bundle.sha256, "model": bundle.manifest.model.sha256},
    )


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Where bundles go: a user's folder, which keeps them, or one of our own."""
    if out is not None:
        yield out
        return
    folder = Path(tempfile.mkdtemp(prefix="kiln-ablate-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
