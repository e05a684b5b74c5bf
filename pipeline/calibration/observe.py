"""What a model's tensors hold on calibration data: streaming statistics by length stratum, in bounded memory.

The tensors of one chunk of one sample are held at a time, `CalibrationConfig.budget` bytes of them: where they are
more, chunks get shorter, and then the data is run several times, for some tensors each.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from passes.quantization.layers import Layer, layers_of
from pipeline.calibration.histogram import Histogram, NotFiniteError, merged_histogram
from pipeline.calibration.running import ObservingSession, prepared_graph
from pipeline.calibration.samples import CalibrationSet, Sample
from pipeline.calibration.subject import CalibrationModel
from pipeline.limits import peak_memory, reset_peak_memory
from pipeline.progress import Progress
from plugins.errors import KilnError
from plugins.paged_attention.schema import cache_names, cache_output_names

_SHORTEST_CHUNK = 128


@dataclass(frozen=True)
class ObserveConfig:
    """`budget`: bytes of observed tensors at a time. `chunk`: most tokens of a prompt that run together."""

    outputs: bool = False
    """Observe what leaves layers, besides what enters them."""
    everything: bool = False
    """Observe every float tensor of the main graph but caches, whose memory nobody has written to begin with."""
    means: bool = False
    """Sum magnitudes by channel, for AWQ."""
    per_channel: bool = False
    """Keep a histogram of each channel, of all data."""
    bins: int = 4096
    """On either side of zero, of a tensor's histogram; a channel's has a sixteenth."""
    chunk: int = 512
    budget: int = 256 * 2**20
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.budget < 1:
            raise KilnError(f"chunks of {self.chunk} tokens and {self.budget} bytes; expected at least 1 of each")


@dataclass(frozen=True)
class Observable:
    """A tensor, the layers it enters or leaves, and its axis of channels."""

    name: str
    layers: tuple[str, ...]
    axis: int


@dataclass
class StratumStatistics:
    """One tensor in one stratum. Channels have [channels] arrays, empty where their number is not fixed."""

    histogram: Histogram
    rows: int = 0
    low: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    high: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    magnitude_sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    @property
    def magnitudes(self) -> NDArray[np.float32]:
        return np.maximum(-self.low, self.high)


@dataclass(frozen=True)
class TensorObservation:
    """One tensor. `strata` has those that had data, in their order; `channels` is None unless asked for."""

    observable: Observable
    strata: Mapping[str, StratumStatistics]
    channels: Histogram | None = None

    @property
    def histogram(self) -> Histogram:
        """Over all data."""
        return merged_histogram([found.histogram for found in self.strata.values()])

    @property
    def magnitudes(self) -> NDArray[np.float32]:
        """Largest of each channel, over all data."""
        found: NDArray[np.float32] = np.max([found.magnitudes for found in self.strata.values()], axis=0)
        return found

    @property
    def mean_magnitudes(self) -> NDArray[np.float64]:
        """Of each channel, over all data; empty unless asked for."""
        sums = np.sum([found.magnitude_sums for found in self.strata.values()], axis=0)
        return np.asarray(sums / max(1, sum(found.rows for found in self.strata.values())))


@dataclass(frozen=True)
class Observed:
    """What was seen: tensors in the graph's order, samples by stratum, and what it took."""

    model_sha256: str
    data_sha256: str
    tensors: Mapping[str, TensorObservation]
    samples: Mapping[str, int]
    runs: int
    """How many times the data was run."""
    chunk: int | None
    """Tokens of a prompt that ran together; None for a model without a KV cache."""
    peak_memory: float | None
    """Most bytes that the process had resident meanwhile; None where the system does not say."""


def observables_of(model: CalibrationModel, config: ObserveConfig = ObserveConfig()) -> list[Observable]:
    """What `config` asks for, in the graph's order. Raises KilnError for a model without layers."""
    graph = prepared_graph(model)
    layers = layers_of(graph)
    if not layers:
        raise KilnError(f"{model.model.path} has no products with constant weights, so nothing to calibrate")
    found: dict[str, list[Layer]] = {}
    for layer in layers:
        for name in (layer.activation, *((layer.output,) if config.outputs else ())):
            found.setdefault(name, []).append(layer)
    made = [*graph.inputs, *(tensor for node in graph.nodes for tensor in node.outputs if not tensor.is_empty())]
    chosen = {tensor.name for tensor in made if config.everything and _is_float(tensor.dtype)} - _caches(model)
    order = [tensor.name for tensor in made if tensor.name in found or tensor.name in chosen]
    return [
        Observable(
            name,
            tuple(layer.name for layer in found.get(name, ())),
            1 if any(layer.kind == "Conv" for layer in found.get(name, ())) else -1,
        )
        for name in order
    ]


def _caches(model: CalibrationModel) -> set[str]:
    layers = range(len(model.decoder.kv.layers)) if model.decoder else ()
    return {name for layer in layers for name in (*cache_names(layer), *cache_output_names(layer))}


def _is_float(dtype: object) -> bool:
    return str(np.dtype(dtype)) in ("float32", "float16", "bfloat16") if dtype is not None else False  # type: ignore[call-overload]


def observe(
    model: CalibrationModel,
    data: CalibrationSet,
    config: ObserveConfig = ObserveConfig(),
    progress: Progress | None = None,
) -> Observed:
    """Run the set and gather. Raises KilnError for a tensor that is not finite, naming it, its layer and the sample."""
    reset_peak_memory()
    observables = observables_of(model, config)
    found = {item.name: _Accumulator(item, config) for item in observables}

    def take(sample: Sample, name: str, values: NDArray[np.float32]) -> None:
        found[name].add(data.stratum_of(sample), values, sample)

    runs, chunk = run_over(model, data, [item.name for item in observables], take, config, progress)
    tensors = {name: accumulator.result(data.strata.names) for name, accumulator in found.items()}
    samples = {name: count for name, count in data.counts.items() if count}
    return Observed(model.model.sha256, data.sha256, tensors, samples, runs, chunk, peak_memory())


def run_over(
    model: CalibrationModel,
    data: CalibrationSet,
    names: Sequence[str],
    take: Callable[[Sample, str, NDArray[np.float32]], None],
    config: ObserveConfig,
    progress: Progress | None = None,
) -> tuple[int, int | None]:
    """Call `take(sample, tensor name, values)` for every chunk of every sample.

    Returns how many runs of the data that took, and the tokens of a chunk, None for a model without a KV cache.
    """
    progress = progress or Progress()
    longest = max(data.lengths)
    sizes = _bytes_of(model, data, names, config)
    chunk = config.chunk
    if model.decoder is not None:
        a_token = max(1, sum(sizes.values()) // min(chunk, longest))
        chunk = max(min(chunk, _SHORTEST_CHUNK), min(chunk, config.budget // a_token))
        sizes = {name: size * chunk // min(config.chunk, longest) for name, size in sizes.items()}
    groups = list(_groups(sizes, config.budget))
    for number, group in enumerate(groups, 1):
        stage = "run calibration data" + (f" ({number}/{len(groups)})" if len(groups) > 1 else "")
        with progress.stage(stage) as update:
            session = ObservingSession(model, group, longest=longest, chunk=chunk, threads=config.threads)
            for index, sample in enumerate(data.samples, 1):
                update(f"sample {index} of {len(data.samples)}")
                for tensors in session.run(sample):
                    for name, values in tensors.items():
                        take(sample, name, values)
    return len(groups), chunk if model.decoder else None


def _bytes_of(
    model: CalibrationModel, data: CalibrationSet, names: Sequence[str], config: ObserveConfig
) -> dict[str, int]:
    """Of each tensor as float32 in the largest sample, or in the first chunk of the longest."""

    def size(sample: Sample) -> int:
        return sample.length if model.decoder else sum(array.size for array in sample.read().values())

    largest = max(data.samples, key=size)
    session = ObservingSession(
        model, names, longest=largest.length, chunk=config.chunk, threads=config.threads, shapes=True
    )
    shapes = next(session.run(largest))
    return {name: 4 * int(np.prod(shape)) for name, shape in shapes.items()}


def _groups(sizes: Mapping[str, int], budget: int) -> Iterator[list[str]]:
    """Consecutive tensors that fit the budget together, at least one each."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > budget:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield group


class _Accumulator:
    """Statistics of one tensor as they come."""

    def __init__(self, observable: Observable, config: ObserveConfig) -> None:
        self._observable, self._config = observable, config
        self._strata: dict[str, StratumStatistics] = {}
        self._channels: Histogram | None = None
        self._count: int | None = None

    def add(self, stratum: str, values: NDArray[np.float32], sample: Sample) -> None:
        if not values.size:
            return
        found = self._strata.setdefault(stratum, StratumStatistics(Histogram(bins=self._config.bins)))
        try:
            found.histogram.add(values)
        except NotFiniteError as error:
            raise KilnError(self._not_finite(values, sample)) from error
        axis = self._observable.axis if values.ndim > self._observable.axis else -1
        rows = np.moveaxis(values, axis, -1).reshape(-1, values.shape[axis]) if values.ndim else values.reshape(1, 1)
        if self._count is None:
            self._count = rows.shape[1]
        if rows.shape[1] != self._count:  # not channels but, say, the tokens that attention looks at
            self._count = 0
        if self._count:
            self._add_channels(found, rows)

    def _add_channels(self, found: StratumStatistics, rows: NDArray[np.float32]) -> None:
        low, high = rows.min(axis=0), rows.max(axis=0)
        first = not found.low.size
        found.low = low if first else np.minimum(found.low, low)
        found.high = high if first else np.maximum(found.high, high)
        found.rows += len(rows)
        if self._config.means:
            sums = np.abs(rows).sum(axis=0, dtype=np.float64)
            found.magnitude_sums = found.magnitude_sums + sums if found.magnitude_sums.size else sums
        if self._config.per_channel:
            if self._channels is None:
                self._channels = Histogram(rows.shape[1], max(2, self._config.bins // 16))
            self._channels.add(np.ascontiguousarray(rows))

    def _not_finite(self, values: NDArray[np.float32], sample: Sample) -> str:
        layers = ", ".join(self._observable.layers)
        kind = "NaN" if np.isnan(values).any() else "infinite values"
        where = f", which the layer {layers} takes or gives," if layers else ""
        return (
            f"the tensor '{self._observable.name}'{where} holds {kind} on {sample.origin}; a range would mean "
            "nothing: leave the sample out, or mend the model"
        )

    def result(self, order: Sequence[str]) -> TensorObservation:
        strata = {name: self._strata[name] for name in order if name in self._strata}
        if not self._count:
            strata = {name: StratumStatistics(found.histogram) for name, found in strata.items()}
        return TensorObservation(self._observable, strata, self._channels if self._count else None)
