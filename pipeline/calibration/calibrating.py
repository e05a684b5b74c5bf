"""Calibration as one function: read the data, refuse what does not cover the traffic, run, choose ranges, report."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from passes.quantization.table import CalibrationTable
from pipeline.calibration.coverage import Coverage, CoverageLimits, coverage_of, traffic_lengths
from pipeline.calibration.data import DataConfig, calibration_set
from pipeline.calibration.drift import DriftReport, drift_of
from pipeline.calibration.observe import ObserveConfig, Observed, observe
from pipeline.calibration.ranges import RangeConfig
from pipeline.calibration.samples import CalibrationSet
from pipeline.calibration.subject import CalibrationModel
from pipeline.calibration.tables import table_from_observed
from pipeline.progress import Progress


@dataclass(frozen=True)
class CalibrationConfig:
    """`traffic`: a trace (`pipeline.load_test.trace`) of the requests that will come; None: texts of every length."""

    data: DataConfig = field(default_factory=DataConfig)
    traffic: Path | None = None
    coverage: CoverageLimits = field(default_factory=CoverageLimits)
    override_coverage: bool = False
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    ranges: RangeConfig = field(default_factory=RangeConfig)


@dataclass(frozen=True)
class Calibration:
    """What came out of it. `observed` can be given to other range methods without running the model again."""

    data: CalibrationSet
    coverage: Coverage
    observed: Observed
    table: CalibrationTable
    drift: DriftReport


def covered_set(
    specs: Sequence[str], model: CalibrationModel, config: CalibrationConfig, progress: Progress
) -> tuple[CalibrationSet, Coverage]:
    """The data, judged against the traffic. Raises KilnError for bad data, and for a set that leaves lengths out."""
    with progress.stage("read calibration data"):
        data = calibration_set(specs, model, config.data)
        traffic = None
        if config.traffic is not None:
            tokenizer = model.tokenizer
            encode, chat = (tokenizer.encode, tokenizer.chat_prompt) if tokenizer else (None, None)
            traffic = traffic_lengths(config.traffic, encode, chat)
    origin = str(config.traffic) if config.traffic else None
    coverage = coverage_of(data.lengths, data.strata, traffic, origin, config.coverage)
    if not config.override_coverage:
        coverage.require()
    elif coverage.faults:
        progress.note(f"warning: the coverage gate is overridden: {coverage.sentence}")
    return data, coverage


def calibrate(
    specs: Sequence[str], model: CalibrationModel, config: CalibrationConfig, progress: Progress
) -> Calibration:
    """Raises KilnError; nothing is written."""
    data, coverage = covered_set(specs, model, config, progress)
    observed = observe(model, data, config.observe, progress)
    warnings = (f"the coverage gate was overridden: {coverage.sentence}",) if coverage.faults else ()
    with progress.stage("choose ranges"):
        table = table_from_observed(observed, config.ranges, warnings)
        drift = drift_of(observed, table)
    return Calibration(data, coverage, observed, table, drift)
