"""The search: which settings are measured, in which order, within a budget of time; and the bundle that comes of it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from numpy.typing import NDArray

from engines.bundle import EngineBundle, open_bundle, refuse_unusable_target, temporary_sibling
from engines.manifest import ServingMeasurement, ServingRecord
from engines.runtime.engine import Engine
from engines.runtime.opening import default_config
from engines.runtime.scheduler import SchedulerConfig
from pipeline.compare.inputs import InputSpec, input_specs_from_graph, sample_of_batch, sample_of_sizes
from pipeline.compare.machine import machine_description
from pipeline.load_test.targets import BundleTarget
from pipeline.load_test.trace import Trace
from pipeline.progress import Progress
from pipeline.tune.config import TuneConfig, sizes_for
from pipeline.tune.derive import derive_bundle
from pipeline.tune.device import (
    DeviceFindings,
    device_name,
    is_for_cuda,
    measured_on_device,
)
from pipeline.tune.measure import DecoderMeasure, plain_sample
from pipeline.tune.search import (
    Point,
    Sample,
    Setting,
    best_or_default,
    doubling,
    efficiency,
    knee,
    single_of,
    smallest_best,
    still_growing,
)
from plugins.errors import KilnError
from plugins.measure import usable_cpus

_BATCH_SHARE, _CHUNK_SHARE = 0.6, 0.8
"""The budget is used up to so much when batch sizes, and then chunk sizes, are done; block sizes get the rest."""


@dataclass(frozen=True)
class Tuning:
    """What a search found. `points` in the order of measurement; the chosen one is among them."""

    bundle: EngineBundle
    config: TuneConfig
    workload: str
    threads: int
    seconds: float
    points: tuple[Point, ...]
    batch_points: tuple[Point, ...]
    """Those of the sweep over batch sizes, ascending."""
    chosen: Point
    remarks: tuple[str, ...]
    device: DeviceFindings | None = None
    """Of an engine on a GPU."""

    def efficiency(self, point: Point) -> float:
        return efficiency(point, single_of(self.batch_points))

    @property
    def knee(self) -> int:
        """The batch size beyond which efficiency falls."""
        return knee(self.batch_points)[0]

    @property
    def falls(self) -> bool:
        """Whether efficiency falls at all within the batch sizes that were measured."""
        return knee(self.batch_points)[1]

    def serving_record(self) -> ServingRecord:
        """As it goes into the new bundle's manifest."""
        setting = self.chosen.setting
        is_decoder = self.bundle.manifest.decoder is not None
        return ServingRecord(
            max_running=setting.batch if is_decoder else None,
            tokens_per_step=setting.tokens_per_step,
            kv_blocks=_kv_blocks(self.bundle, self.config, setting),
            max_batch=None if is_decoder else setting.batch,
            decode_steps={} if self.device is None else dict(self.device.decode_steps),
            objective=self.config.objective,
            slo=self.config.limits,
            knee=self.knee,
            falls=self.falls,
            workload=self.workload,
            machine=machine_description() | ({"gpu": device_name()} if is_for_cuda(self.bundle) else {}),
            threads=self.threads,
            measurements=tuple(self._measurement(point) for point in self.points),
        )

    def _measurement(self, point: Point) -> ServingMeasurement:
        return ServingMeasurement(
            concurrency=point.setting.batch,
            tokens_per_step=point.setting.tokens_per_step,
            block_size=point.setting.block_size,
            repetitions=len(point.samples),
            requests_per_second=point.rate,
            latency=point.latency,
            noise=point.noise,
            efficiency=self.efficiency(point),
            first_token=point.median_of("first_token"),
            inter_token=point.median_of("inter_token"),
            goodput=point.median_of("goodput"),
        )

    def write(self, path: Path) -> EngineBundle:
        """The bundle with what was chosen. Raises BundleError when the parent has changed since it was opened."""
        size = self.chosen.setting.block_size
        return derive_bundle(
            self.bundle,
            path,
            block_size=size,
            kernel_rows=None if self.device is None else self.device.kernel_rows,
            algorithms=None if self.device is None else self.device.algorithms,
            serving=self.serving_record(),
            verified=None if self.device is None else self.device.verified,
        )


def tune(path: Path, out: Path, trace: Trace, workload: str, config: TuneConfig, progress: Progress) -> Tuning:
    """Search the best settings of the bundle at `path`; variants lie beside `out` meanwhile. Writes nothing.

    Raises KilnError when the bundle does not verify, the budget is too short to measure anything, or no setting keeps
    the limits.
    """
    refuse_unusable_target(out)
    bundle = open_bundle(path)
    search = _Search(bundle, config, progress)
    if is_for_cuda(bundle):
        with temporary_sibling(out) as folder:
            search.on_device(folder)
    if bundle.manifest.decoder is None:
        if config.slo.limits:
            raise KilnError(f"{bundle.manifest.name} generates no tokens; limit its --slo-latency")
        workload = search.plain()
    else:
        if config.most_latency is not None:
            raise KilnError(f"{bundle.manifest.name} generates tokens; use --slo-first-token and --slo-inter-token")
        if any(request.prompt_tokens is None for request in trace):
            raise KilnError("the trace has prompts as text, which would be cached; expected prompt_tokens on each line")
        with temporary_sibling(out) as folder:
            search.decoder(trace, folder)
    assert search.chosen is not None
    return Tuning(
        bundle=bundle,
        config=config,
        workload=workload,
        threads=config.threads or usable_cpus(),
        seconds=search.elapsed(),
        points=tuple(search.points),
        batch_points=tuple(search.batch_points),
        chosen=search.chosen,
        remarks=tuple(search.remarks),
        device=search.device,
    )


Measure = Callable[[Setting, float], Sample | None]
"""Measures a setting once; None when the deadline comes first."""


class _Search:
    """One search: its clock, its points, and what was chosen so far."""

    def __init__(self, bundle: EngineBundle, config: TuneConfig, progress: Progress) -> None:
        self.points: list[Point] = []
        self.batch_points: list[Point] = []
        self.chosen: Point | None = None
        self.remarks: list[str] = []
        self.device: DeviceFindings | None = None
        self._bundle = bundle
        self._config, self._sizes = config, sizes_for(config, is_for_cuda(bundle))
        self._progress = progress
        self._start = time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def on_device(self, folder: Path) -> None:
        """What only the GPU can tell: is the engine right there, with which kernels, and which steps are captured."""
        self.device = measured_on_device(self._bundle, self._sizes.max_batch, folder, self._progress)
        if self.device.decode_steps:
            self.remarks.append(self.device.sentence)

    def plain(self) -> str:
        """Batch sizes of a model without a KV cache; returns the workload in words."""
        config = self._config
        manifest = self._bundle.manifest
        specs = input_specs_from_graph(self._bundle.engine_path, manifest.inputs)
        _refuse_fixed_batch(manifest.name, specs)

        def feeds(batch: int) -> dict[str, NDArray]:
            if config.length is None:
                return sample_of_batch(specs, batch, config.seed)
            return sample_of_sizes(specs, batch, config.length, config.seed)

        with Engine.open(self._bundle.path, threads=config.threads) as engine:

            def measure(setting: Setting, deadline: float) -> Sample | None:
                inputs = feeds(setting.batch)
                return plain_sample(
                    engine.infer, inputs, setting.batch, config.window, deadline, config.most_latency, time.monotonic
                )

            self._sweep_batches([Setting(size) for size in doubling(self._sizes.max_batch)], measure, 1.0)
        self.chosen = smallest_best(self.batch_points, config.objective)
        shapes = " ".join("x".join(map(str, value.shape[1:])) for value in feeds(1).values())
        return f"inputs of {shapes}, one batch after the other, seed {config.seed}"

    def decoder(self, trace: Trace, folder: Path) -> None:
        """Batch sizes, then with the chosen one chunk sizes, then block sizes."""
        config = self._config
        decoder = self._bundle.manifest.decoder
        assert decoder is not None
        chunk, block = default_config(self._bundle.manifest).tokens_per_step, decoder.kv.block_size
        measure = DecoderMeasure(trace, config.slo, config.seed)

        def once(target: BundleTarget, setting: Setting, deadline: float) -> Sample | None:
            return measure(target, setting.batch, config.window, deadline)

        def warm_up(target: BundleTarget, setting: Setting, deadline: float) -> None:
            """A new engine is slower at first: its memory is touched for the first time."""
            measure(target, setting.batch, 0.0, deadline)

        wide = max(chunk, self._sizes.max_batch)
        settings = [Setting(size, wide, block) for size in doubling(self._sizes.max_batch)]
        with self._target(self._bundle.path, Setting(self._sizes.max_batch, wide, block)) as target:
            warm_up(target, settings[0], self._start + self._config.budget)
            self._sweep_batches(settings, lambda setting, deadline: once(target, setting, deadline), _BATCH_SHARE)
        self.chosen = smallest_best(self.batch_points, config.objective)

        def with_engine(setting: Setting, deadline: float) -> Sample | None:
            with self._target(self._variant(folder, setting), setting) as target:
                warm_up(target, setting, deadline)
                return once(target, setting, deadline)

        batch = self.chosen.setting.batch
        chunks = sorted({size for size in self._sizes.chunk_sizes if size >= batch} | {max(chunk, batch)})
        default = Setting(batch, max(chunk, batch), block)
        self._sweep_others(
            "chunk", [Setting(batch, size, block) for size in chunks], default, with_engine, _CHUNK_SHARE
        )
        default = self.chosen.setting
        sizes = sorted({*self._sizes.block_sizes, block})
        variants = [Setting(batch, default.tokens_per_step, size) for size in sizes]
        self._sweep_others("block", variants, default, with_engine, 1.0)

    def _sweep_batches(self, settings: Sequence[Setting], measure: Measure, share: float) -> None:
        """Rounds over ascending batch sizes; the first round ends where throughput grows no more."""
        points = [Point(setting) for setting in settings]
        deadline = self._start + share * self._config.budget
        for repetition in range(self._config.repetitions):
            for place, point in enumerate(points):
                if repetition == 0 and not still_growing(points[:place]):
                    points = points[:place]
                    break
                if not self._measure_point(point, measure, deadline):
                    break
            else:
                continue
            if time.monotonic() >= deadline:
                break
        self.batch_points = [point for point in points if point.samples]
        self.points += self.batch_points
        if len(self.batch_points) < len(points):
            self.remarks.append("The budget ended before the larger batch sizes were measured; raise --budget.")
        single_of(self.batch_points)

    def _sweep_others(
        self, what: str, settings: Sequence[Setting], default: Setting, measure: Measure, share: float
    ) -> None:
        """Rounds over settings that compete with a default, which is measured among them.

        The default stays where the budget ends before the last round: one that is better in one round may be noise.
        """
        points = {setting: Point(setting) for setting in [default, *(s for s in settings if s != default)]}
        deadline = self._start + share * self._config.budget
        for _ in range(self._config.repetitions):
            if not all(self._measure_point(point, measure, deadline) for point in points.values()):
                break
        measured = [point for point in points.values() if point.samples]
        self.points += measured
        complete = [point for point in measured if len(point.samples) == self._config.repetitions]
        if len(complete) < len(points):
            self.remarks.append(f"The budget ended before all rounds of {what} sizes; raise --budget.")
        if points[default] in complete:
            self.chosen = best_or_default(complete, points[default], self._config.objective)

    def _measure_point(self, point: Point, measure: Measure, deadline: float) -> bool:
        """One measurement more; False when the deadline came first."""
        if time.monotonic() >= deadline:
            return False
        with self._progress.console.status(f"{point.setting} ..."):
            sample = measure(point.setting, deadline)
        if sample is None:
            return False
        point.samples.append(sample)
        self._progress.note(
            f"{self.elapsed():6.1f} s  {point.setting}: {sample.rate:.3g} requests/s, {sample.latency:.3g} s each"
        )
        return True

    @contextmanager
    def _target(self, path: Path, setting: Setting) -> Iterator[BundleTarget]:
        assert setting.tokens_per_step is not None
        scheduling = SchedulerConfig(max_running=setting.batch, tokens_per_step=setting.tokens_per_step)
        engine = Engine.open(
            path,
            kv_blocks=_kv_blocks(self._bundle, self._config, setting),
            config=scheduling,
            threads=self._config.threads,
        )
        with engine:
            yield BundleTarget(engine)

    def _variant(self, folder: Path, setting: Setting) -> Path:
        """The bundle, or one with another block size, made when it is first asked for."""
        decoder = self._bundle.manifest.decoder
        assert decoder is not None
        if setting.block_size == decoder.kv.block_size:
            return self._bundle.path
        path = folder / f"blocks-{setting.block_size}" / "bundle"  # the folder itself is locked by us
        if not path.exists():
            derive_bundle(self._bundle, path, block_size=setting.block_size)
        return path


def _kv_blocks(bundle: EngineBundle, config: TuneConfig, setting: Setting) -> int | None:
    """The configured memory in blocks of the setting's size: options count in the bundle's own."""
    decoder = bundle.manifest.decoder
    if config.kv_blocks is None or decoder is None or setting.block_size is None:
        return None
    return max(1, config.kv_blocks * decoder.kv.block_size // setting.block_size)


def _refuse_fixed_batch(name: str, specs: Sequence[InputSpec]) -> None:
    fixed = next((spec for spec in specs if spec.shape and isinstance(spec.shape[0], int)), None)
    if fixed is not None:
        raise KilnError(
            f"{name} takes batches of {fixed.shape[0]} only (input {fixed.name}), so there is nothing to choose; "
            "export it with a dynamic batch"
        )
