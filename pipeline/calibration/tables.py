"""From observations to the `CalibrationTable` that the rewrites use."""

from collections.abc import Sequence

from passes.quantization.table import CalibrationTable, ChannelRanges, Range, TensorStatistics
from pipeline.calibration.histogram import Histogram
from pipeline.calibration.observe import Observed, TensorObservation
from pipeline.calibration.ranges import RangeConfig, ranges_of


def table_from_observed(observed: Observed, config: RangeConfig, warnings: Sequence[str] = ()) -> CalibrationTable:
    """Ranges by a method, of every observed tensor that had values."""
    return CalibrationTable(
        model_sha256=observed.model_sha256,
        data_sha256=observed.data_sha256,
        method=config.method,
        symmetric=config.symmetric,
        tensors={name: _statistics(found, config) for name, found in observed.tensors.items() if found.strata},
        samples=dict(observed.samples),
        warnings=tuple(warnings),
        percentile=config.percentile if config.method == "percentile" else None,
    )


def range_of(histogram: Histogram, config: RangeConfig) -> Range:
    """Of a histogram of one channel."""
    low, high = ranges_of(histogram, config)
    return Range(float(low[0]), float(high[0]))


def _statistics(found: TensorObservation, config: RangeConfig) -> TensorStatistics:
    channels = None
    if found.channels is not None:
        low, high = ranges_of(found.channels, config)
        channels = ChannelRanges(tuple(low.tolist()), tuple(high.tolist()))
    return TensorStatistics(
        range=range_of(found.histogram, config),
        strata={name: range_of(statistics.histogram, config) for name, statistics in found.strata.items()},
        channel_magnitudes=tuple(found.magnitudes.tolist()),
        mean_magnitudes=tuple(found.mean_magnitudes.tolist()),
        channels=channels,
    )
