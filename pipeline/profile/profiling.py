"""`kiln profile`: where the time of a bundle's requests goes, and what limits it on this machine.

Requests go through the runtime that serves them. How operators are timed depends on the machine: `on_cpu`, `on_device`.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from engines.backends.onnxruntime import CPU
from engines.bundle import EngineBundle, open_bundle
from engines.runtime.opening import check_plugins
from pipeline.compare.machine import machine_description, package_versions
from pipeline.device_limits import require_torch_cuda
from pipeline.profile.analysis import Phase, phase_from_passes, seconds_of_runs
from pipeline.profile.device_roofline import measure_device_roofline
from pipeline.profile.on_cpu import measure_on_cpu
from pipeline.profile.on_device import measure_on_device
from pipeline.profile.on_tensorrt import layers_of_bundle, measure_on_tensorrt
from pipeline.profile.playing import Measured, Traced
from pipeline.profile.roofline import Roofline, best_roofline, measure_roofline
from pipeline.profile.tensorrt_wastes import tensorrt_wastes
from pipeline.profile.waste import Waste
from pipeline.profile.wastes import largest_first, wastes_from_phase
from pipeline.profile.workloads import Kind, ProfileConfig, Session, decoder_workload, plain_workload
from pipeline.progress import Progress
from plugins.cuda_runtime import PROVIDER as CUDA
from plugins.cuda_runtime import CudaRuntime
from plugins.errors import KilnError
from plugins.measure import usable_cpus

_LIBRARIES = ("onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx")


@dataclass(frozen=True)
class Profile:
    """Everything that was found. `wastes` and `traced` go by the phase's name.

    `processor` is what operators ran on, in words; `threads` is None on a device, `roofline` for a TensorRT plan.
    """

    created: str
    bundle: EngineBundle
    config: ProfileConfig
    processor: str
    threads: int | None
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    roofline: Roofline | None
    phases: tuple[Phase, ...]
    wastes: Mapping[str, Sequence[Waste]]
    traced: Mapping[str, Traced]


def profile(bundle_path: Path, config: ProfileConfig, progress: Progress) -> Profile:
    """Profile a bundle on this machine. Raises KilnError for one that cannot be opened or profiled here."""
    bundle = open_bundle(bundle_path)
    check_plugins(bundle)
    provider = bundle.manifest.backend.provider
    if provider == CUDA:
        return _profile_on_device(bundle, config, progress)
    if provider == CPU:
        return _profile_on_cpu(bundle, config, progress)
    if bundle.manifest.tensorrt is not None and bundle.manifest.backend.name != "onnxruntime":
        return _profile_of_plan(bundle, config, progress)
    raise KilnError(
        f"{bundle_path} runs on ONNX Runtime's {provider}, whose engines show no layers; build a plan: kiln tensorrt "
        "build --backend tensorrt, or use Nsight Systems"
    )


def _profile_on_cpu(bundle: EngineBundle, config: ProfileConfig, progress: Progress) -> Profile:
    threads = config.threads or usable_cpus()
    kinds, session = _workload(bundle, config, threads)
    limits = partial(measure_roofline, threads, _rows(kinds))
    measured, roofline = _between_rooflines(limits, measure_on_cpu, kinds, session, progress)
    return _profile_from_measured(bundle, config, kinds, measured, roofline, machine_description()["cpu"], threads)


def _profile_on_device(bundle: EngineBundle, config: ProfileConfig, progress: Progress) -> Profile:
    _refuse_threads(bundle, config)
    require_torch_cuda("the profile of an engine on a GPU")
    kinds, session = _workload(bundle, config)
    limits = partial(measure_device_roofline, _rows(kinds), bundle.manifest.precision == "fp32")
    measured, roofline = _between_rooflines(limits, measure_on_device, kinds, session, progress)
    return _profile_from_measured(bundle, config, kinds, measured, roofline, _device_name(), None)


def _profile_of_plan(bundle: EngineBundle, config: ProfileConfig, progress: Progress) -> Profile:
    _refuse_threads(bundle, config)
    kinds, session = _workload(bundle, config)
    layers = layers_of_bundle(bundle.path)
    measured = measure_on_tensorrt(kinds, session, layers, progress)
    found = _profile_from_measured(bundle, config, kinds, measured, None, _device_name(), None)
    wastes = {phase.name: largest_first(tensorrt_wastes(phase, layers), phase) for phase in found.phases}
    return replace(found, wastes=wastes)


def _workload(bundle: EngineBundle, config: ProfileConfig, threads: int = 1) -> tuple[list[Kind], Session]:
    return (decoder_workload if bundle.manifest.decoder else plain_workload)(bundle, config, threads)


def _between_rooflines(
    limits: Callable[[], Roofline],
    measure: Callable[[Sequence[Kind], Session, Path, Progress], Measured],
    kinds: Sequence[Kind],
    session: Session,
    progress: Progress,
) -> tuple[Measured, Roofline]:
    """The machine's limits are measured before and after: what else used it in one of them does not count."""
    with progress.stage("measure the roofline"):
        before = limits()
    with tempfile.TemporaryDirectory(prefix="kiln-profile-") as folder:
        measured = measure(kinds, session, Path(folder), progress)
    with progress.stage("measure the roofline again"):
        return measured, best_roofline(before, limits())


def _refuse_threads(bundle: EngineBundle, config: ProfileConfig) -> None:
    if config.threads is not None:
        raise KilnError(f"threads is {config.threads}, but {bundle.path} runs on a GPU: leave it out")


def _device_name() -> str:
    runtime = CudaRuntime()
    runtime.close()
    return runtime.name


def _rows(kinds: Sequence[Kind]) -> set[int]:
    """Of products of the phases, and of twice their batch."""
    return {1} | {count for kind in kinds for count in (kind.tokens, 2 * kind.tokens)}


def _profile_from_measured(
    bundle: EngineBundle,
    config: ProfileConfig,
    kinds: Sequence[Kind],
    measured: Measured,
    roofline: Roofline | None,
    processor: str,
    threads: int | None,
) -> Profile:
    phases = []
    for kind in kinds:
        runs = [one.runs for one in measured.traced[kind.name]]
        plain, works = measured.plain[kind.name], None if measured.works is None else measured.works[kind.name]
        device = None if threads is not None else measured.device.get(kind.name) or seconds_of_runs(runs)
        phases.append(phase_from_passes(kind.name, kind.title, kind.tokens, plain, runs, works, roofline, device))
    return Profile(
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        bundle=bundle,
        config=config,
        processor=processor,
        threads=threads,
        machine=machine_description(),
        versions={"kiln": bundle.manifest.kiln_version, **package_versions(*_LIBRARIES)},
        roofline=roofline,
        phases=tuple(phases),
        wastes={}
        if roofline is None
        else {phase.name: wastes_from_phase(phase, roofline, bundle.manifest, threads) for phase in phases},
        traced={kind.name: measured.traced[kind.name][len(measured.traced[kind.name]) // 2] for kind in kinds},
    )
