"""`kiln profile`: where the time of a bundle's requests goes, and what limits it on this machine.

A bundle is opened three times, one after the other: as it is served, for the times; with ONNX Runtime's profiler, for
the operators; and with weights left as they are stored, because packed ones have no shape, for the work of each.
Requests go through the runtime that serves them.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.backends.onnxruntime import CPU
from engines.bundle import EngineBundle, open_bundle
from engines.runtime.opening import check_plugins
from pipeline.compare.machine import machine_description, package_versions
from pipeline.operator_work import Arithmetic, CallWork, call_work
from pipeline.profile.analysis import Phase, phase_from_passes
from pipeline.profile.ort_events import Run, runs_from_profile
from pipeline.profile.recording import (
    Pass,
    Step,
)
from pipeline.profile.roofline import Roofline, best_roofline, measure_roofline
from pipeline.profile.wastes import Waste, wastes_from_phase
from pipeline.profile.workloads import Kind, ProfileConfig, Session, decoder_workload, plain_workload
from pipeline.progress import Progress
from plugins.errors import KilnError
from plugins.measure import usable_cpus
from plugins.paged_attention.schema import OP_TYPE

_UNPACKED = {"session.disable_prepacking": "1"}
_ARITHMETICS: tuple[Arithmetic, ...] = ("fp32", "int8")


@dataclass(frozen=True)
class Traced:
    """A pass with the profiler: its steps by the process's clock, and what ran in each."""

    steps: tuple[Step, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Profile:
    """Everything that was found. `wastes` and `traced` go by the phase's name."""

    created: str
    bundle: EngineBundle
    config: ProfileConfig
    threads: int
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    roofline: Roofline
    phases: tuple[Phase, ...]
    wastes: Mapping[str, Sequence[Waste]]
    traced: Mapping[str, Traced]


def profile(bundle_path: Path, config: ProfileConfig, progress: Progress) -> Profile:
    """Profile a bundle on this machine. Raises KilnError for one that must not be opened, or is not for a CPU."""
    bundle = open_bundle(bundle_path)
    check_plugins(bundle)
    if bundle.manifest.backend.provider != CPU:
        raise KilnError(
            f"{bundle_path} runs on {bundle.manifest.backend.provider}; kiln profile reads ONNX Runtime's profile on "
            f"{CPU} only: use Nsight Systems on kiln bench there"
        )
    threads = config.threads or usable_cpus()
    kinds, session, windows = (decoder_workload if bundle.manifest.decoder else plain_workload)(bundle, config, threads)
    rows = {1} | {count for kind in kinds for count in (kind.tokens, 2 * kind.tokens)}
    with progress.stage("measure the roofline"):
        before = measure_roofline(threads, rows, _ARITHMETICS)
    with tempfile.TemporaryDirectory(prefix="kiln-profile-") as folder:
        plain, _ = _played(kinds, session, None, progress, "run")
        profiled, events = _played(kinds, session, Path(folder) / "timed", progress, "run with the profiler")
        with progress.stage("count operations and bytes"):
            works = _works(kinds, session, Path(folder) / "work", profiled, windows)
    with progress.stage("measure the roofline again"):
        roofline = best_roofline(before, measure_roofline(threads, rows, _ARITHMETICS))
    phases, traced = [], {}
    for kind in kinds:
        runs = [[events[step.number] for step in one.steps] for one in profiled[kind.name]]
        phases.append(
            phase_from_passes(kind.name, kind.title, kind.tokens, plain[kind.name], runs, works[kind.name], roofline)
        )
        middle = len(runs) // 2
        traced[kind.name] = Traced(profiled[kind.name][middle].steps, tuple(runs[middle]))
    return Profile(
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        bundle=bundle,
        config=config,
        threads=threads,
        machine=machine_description(),
        versions={"kiln": bundle.manifest.kiln_version, **package_versions("onnxruntime")},
        roofline=roofline,
        phases=tuple(phases),
        wastes={phase.name: wastes_from_phase(phase, roofline, bundle.manifest, threads) for phase in phases},
        traced=traced,
    )


def _played(
    kinds: Sequence[Kind], session: Session, file: Path | None, progress: Progress, what: str
) -> tuple[dict[str, list[Pass]], list[Run]]:
    """Passes by phase, and with a profile's `file` the runs of all steps."""
    with progress.stage(f"{what}: open"):
        backend = session.open(file, None)
    recorder = session.watch(backend)
    passes = {}
    with session.engine(recorder) as engine:
        for kind in kinds:
            with progress.stage(f"{what}: {kind.title}"):
                passes[kind.name] = kind.play(engine, recorder)
    runs = [] if file is None else runs_from_profile(backend.end_profile())
    backend.close()
    if file is not None and len(runs) != len(recorder.steps):
        raise KilnError(
            f"ONNX Runtime's profile has {len(runs)} runs, but {len(recorder.steps)} steps were made; it keeps about a "
            "million events: profile fewer --tokens"
        )
    return passes, runs


def _works(
    kinds: Sequence[Kind],
    session: Session,
    file: Path,
    passes: Mapping[str, Sequence[Pass]],
    windows: Sequence[int | None],
) -> dict[str, dict[int, CallWork]]:
    """Work by node index of the middle pass of each phase, from running it once more."""
    backend = session.open(file, _UNPACKED)
    middles = {kind.name: passes[kind.name][len(passes[kind.name]) // 2] for kind in kinds}
    for kind in kinds:
        session.replay(backend, kind, middles[kind.name])
    runs = iter(runs_from_profile(backend.end_profile()))
    backend.close()
    works: dict[str, dict[int, CallWork]] = {}
    for kind in kinds:
        total: dict[int, CallWork] = {}
        for step in middles[kind.name].steps:
            layers = iter(windows)
            for call in next(runs).calls:
                window = next(layers) if call.operator == OP_TYPE else None
                work = call_work(call.arguments, step.sequences, window)
                total[call.index] = _sum(total[call.index], work) if call.index in total else work
        works[kind.name] = total
    return works


def _sum(first: CallWork, second: CallWork) -> CallWork:
    return CallWork(
        first.operations + second.operations,
        first.arithmetic,
        max(first.rows, second.rows),
        first.weights + second.weights,
        first.cache + second.cache,
        first.activations + second.activations,
    )
