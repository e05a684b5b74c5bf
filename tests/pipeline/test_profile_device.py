"""What limits phases on a GPU, and whole profiles over a stand-in device in host memory."""

import io
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from engines.backends.cuda_decoder import CudaDecoder
from engines.backends.cuda_launching import LaunchingCudaDecoder
from engines.bundle import EngineBundle, open_bundle
from pipeline.device_trace import (
    Activity,
    Span,
)
from pipeline.operator_work import CallWork
from pipeline.profile import ProfileConfig, on_device, profile, profiling
from pipeline.profile.analysis import Bound, Phase, phase_from_passes
from pipeline.profile.attribution import COPIES, OUTSIDE
from pipeline.profile.backends import captured_sizes
from pipeline.profile.html import html_from_profile
from pipeline.profile.on_device import measure_on_device
from pipeline.profile.ort_events import KernelCall, Run
from pipeline.profile.playing import REPLAYS, Measured
from pipeline.profile.recording import Pass, RecordingLauncher, Step
from pipeline.profile.report import json_from_profile, tables_from_profile
from pipeline.profile.roofline import Roofline
from pipeline.profile.trace import trace_from_profile
from pipeline.profile.wastes import wastes_from_phase
from pipeline.profile.workloads import Session, decoder_workload
from pipeline.progress import Progress
from plugins.cuda_runtime import PROVIDER as CUDA
from plugins.errors import KilnError
from tests.engines.host_runtime import HostRuntime

pytest.importorskip("onnxruntime")

US = 1000
"""Nanoseconds."""
KERNELS = 5
"""Of a step on the stand-in device: its first nodes have one each."""


ROOF = Roofline(
    memory=4e12, cache=8e12, peak=8e14, peak_of="16-bit", call=1e-6,
    products={"16-bit": {256: 6e14, 8192: 8e14}, "int8": {256: 1e15, 8192: 1.5e15}, "float8": {256: 1e15}},
)  # fmt: skip
WEIGHTS = 100 << 20
"""Bytes."""


def phase_of(works: list[CallWork], operators: list[str], name: str, slower: float = 1.3, wall: float = 1.1) -> Phase:
    """Each node takes `slower` times its least; pauses of 2 us follow, and the pass takes `wall` times as long."""
    times = [max(ROOF.best(work), 1e-6) * slower for work in works]
    calls = tuple(
        KernelCall(i, f"n{i}", op, 0.0, seconds, {})
        for i, (op, seconds) in enumerate(zip(operators, times, strict=True))
    )
    run = Run(0.0, sum(times) + 2e-6, calls)
    plain = [Pass((Step(0, 0.0, 99.0),), run.seconds * wall)]  # launched long before it ran
    return phase_from_passes(name, name, 1, plain, [[run]], dict(enumerate(works)), ROOF, device=run.seconds)


def product(rows: int, bits: int, arithmetic: Any = "16-bit") -> CallWork:
    elements = WEIGHTS * 8 // bits
    return CallWork(2.0 * rows * elements, arithmetic, rows, WEIGHTS, 0, 1000)


def test_the_devices_pauses_are_dispatch_and_the_rest_of_a_pass_is_the_hosts() -> None:
    phase = phase_of([product(1, 16)], ["Linear"], "decode_batch_1")
    assert phase.dispatch == pytest.approx(2e-6)
    assert phase.host == pytest.approx(phase.seconds - phase.in_operators - 2e-6)
    assert sum(phase.parts.values()) == pytest.approx(phase.seconds)
    assert phase.slowdown == 1
    slowed = phase_of([product(1, 16)], ["Linear"], "decode_batch_1", wall=0.8)
    assert (slowed.host, slowed.dispatch) == (0, 0)
    assert slowed.slowdown == slowed.in_operators / slowed.seconds > 1.1


@pytest.mark.parametrize(
    ("work", "operator", "name", "verdict", "switch"),
    [
        (product(1, 16), "Linear", "decode_batch_1", "bandwidth", "build-engine --quant int8 or fp8"),
        (product(16, 8), "QuantLinear", "decode_batch_16", "bandwidth", "build-engine --quant int4"),
        (product(4096, 16), "Linear", "prefill_4096", "compute", "build-engine --quant int8 or fp8"),
        (
            CallWork(1e6, "16-bit", 64, 0, 100 << 20, 1000), "PagedAttention", "decode_batch_64", "bandwidth",
            "build-engine --kv-cache int8-kv",
        ),
        (CallWork(10.0, "fp32", 0, 0, 0, 100), "AddRmsNorm", "decode_batch_1", "launch", "kiln tune"),
    ],
)  # fmt: skip
def test_wastes_of_a_gpu_have_switches_of_a_gpu(
    work: CallWork, operator: str, name: str, verdict: Bound, switch: str, llama_bundle: Path
) -> None:
    manifest = open_bundle(llama_bundle).manifest
    assert manifest.decoder is not None
    half = replace(manifest.decoder, kv=replace(manifest.decoder.kv, dtype="bfloat16"))
    manifest = manifest.model_copy(update={"decoder": half})
    phase = phase_of([work], [operator], name)
    assert phase.verdict == verdict
    wastes = wastes_from_phase(phase, ROOF, manifest, None)
    assert any(switch in waste.switch for waste in wastes)
    for waste in wastes:
        assert 0 < waste.seconds <= phase.accounted
        assert not any(own in waste.switch for own in ("--threads", "--kv-dtype", "w8a8", "--attention", "nhwc"))


def test_int4_weights_have_nothing_narrower(llama_bundle: Path) -> None:
    phase = phase_of([product(1, 4)], ["QuantLinear"], "decode_batch_1")
    wastes = wastes_from_phase(phase, ROOF, open_bundle(llama_bundle).manifest, None)
    assert not any("--quant" in waste.switch for waste in wastes)


class StandIn:
    """A device and its profilers: a step's first nodes launch a kernel each, every 10 us from its beginning on.

    ONNX Runtime's runs are real, but for their times, which are made to fit.
    """

    def __init__(self, session: Session, rename: str = "") -> None:
        self.session, self.rename, self.begun = session, rename, list[int]()
        self.records = 0

    def replay(self, backend: Any, kind: Any, step: Step) -> None:
        self.begun.append(time.time_ns())
        self.session.replay(backend, kind, step)

    def record(self, run: Callable[[], object]) -> list[Activity]:
        first = len(self.begun)
        self.records += 1
        run()
        return [one for begun in self.begun[first:] for one in self._step(begun)]

    def clock(self, stream: int, queue: Callable[[], object], wait: Callable[[], object]) -> float:
        queue()
        wait()
        return 47e-6

    def _step(self, begun: int) -> list[Activity]:
        def at(start: float, end: float) -> Span:
            return Span(begun + round(start * US), begun + round(end * US))

        names = [f"k{i}" for i in range(KERNELS)]
        if self.records == 2:  # the first one only starts the profiler
            names[2] += self.rename
        kernels = [
            Activity(name, at(10 * i + 12, 10 * i + 20), True, at(10 * i + 3, 10 * i + 8))
            for i, name in enumerate(names)
        ]
        return [Activity("in", at(1, 2), False), *kernels, Activity("out", at(80, 81), False)]

    def runs(self, real: Callable[..., list[Run]]) -> Callable[..., list[Run]]:
        def fitted(session: Session, backend: Any, steps: int) -> list[Run]:
            origin = backend.profile_start
            found = real(session, backend, steps)
            return [self._fitted(run, (at - origin) / 1e9) for run, at in zip(found, self.begun[-steps:], strict=True)]

        return fitted

    def _fitted(self, run: Run, begun: float) -> Run:
        calls = [
            replace(call, start=begun + 10e-6 * min(i, KERNELS) + 1e-6 * max(i - KERNELS, 0), seconds=10e-6)
            for i, call in enumerate(run.calls)
        ]
        return replace(run, start=begun, calls=tuple(calls))


@pytest.fixture(scope="module")
def launching_bundle(llama_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineBundle:
    """The CPU's bundle, which is used as if it were for a GPU, with a graph that chooses tokens."""
    import onnx

    from passes.bind_sampling import BindSampling
    from passes.graph import graph_from_path, proto_from_graph, tidy

    path = tmp_path_factory.mktemp("launching") / "bundle"
    shutil.copytree(llama_bundle, path)
    bundle = replace(open_bundle(llama_bundle), path=path)
    graph = graph_from_path(bundle.engine_path)
    assert BindSampling().call(graph).changed
    tidy(graph)
    onnx.save(proto_from_graph(graph), bundle.engine_path)
    return bundle


CONFIG = ProfileConfig(prompt=40, batches=(1, 3), context=20, tokens=8, repetitions=2)


def opened_on_host(session: Session, bundle: EngineBundle, kind: type[CudaDecoder]) -> Session:
    """A session whose decoder has its device in host memory, with a step of 4 sequences captured."""
    decoder = bundle.manifest.decoder
    assert decoder is not None

    def open_backend(file: Path | None, entries: Any) -> CudaDecoder:
        return kind(
            bundle.engine_path,
            decoder.kv,
            40,
            max_context=decoder.max_context,
            plugins=bundle.plugin_paths,
            ladder=(1, 4),
            runtime=HostRuntime(),
            profile=file,
        )

    return replace(session, open=open_backend, at_opening=2)


@pytest.mark.parametrize("launching", [True, False])
def test_a_profile_over_a_stand_in_device(
    launching: bool,
    launching_bundle: EngineBundle,
    llama_bundle: Path,
    tmp_path: Path,
    silent: Progress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = launching_bundle if launching else open_bundle(llama_bundle)
    kinds, session = decoder_workload(bundle, CONFIG, 1)
    session = opened_on_host(session, bundle, LaunchingCudaDecoder if launching else CudaDecoder)
    device = StandIn(session)
    monkeypatch.setattr(on_device, "profiled_runs", device.runs(on_device.profiled_runs))
    found = measure_on_device(
        kinds, replace(session, replay=device.replay), tmp_path, silent, device.record, device.clock
    )
    assert list(found.plain) == list(found.traced) == ["prefill_40", "decode_batch_1", "decode_batch_3"]
    for kind in kinds:
        assert len(found.traced[kind.name]) == REPLAYS
        for one in found.traced[kind.name]:
            (run,) = one.runs
            first = [index for index in found.works[kind.name] if index != OUTSIDE][:KERNELS]
            assert [call.index for call in run.calls] == [OUTSIDE, *first, OUTSIDE]
            assert run.seconds == pytest.approx((1 + 48 + 1) * 1e-6)
        phase = phase_from_passes(
            *(kind.name, kind.title, kind.tokens, found.plain[kind.name]),
            *([one.runs for one in found.traced[kind.name]], found.works[kind.name], ROOF, 47e-6),
        )
        assert phase.in_operators == pytest.approx((1 + 5 * 8 + 1) * 1e-6)
        assert phase.dispatch == pytest.approx(5e-6)
    assert found.device == (dict.fromkeys(found.plain, 47e-6) if launching else {})
    assert_passes_are_of_a_serving_engine(found, launching)


def assert_passes_are_of_a_serving_engine(found: Measured, launching: bool) -> None:
    """Steps that were launched ahead begin before the one before them ends, and passes add up all the same."""
    decoding = found.plain["decode_batch_3"]
    assert all(len(one.steps[0].sequences) == 3 and one.seconds > 0 for one in decoding)
    ahead = [later.steps[0].start < before.steps[0].end for before, later in pairwise(decoding)]
    assert all(ahead) if launching else not any(ahead)
    assert all((one.steps[0].launch is not None) == launching for one in decoding)


def test_steps_are_captured_as_when_it_serves(llama_bundle: Path) -> None:
    manifest = as_of_gpu(open_bundle(llama_bundle)).manifest
    assert captured_sizes(manifest, (1, 12, 3)) == (1, 4, 16)
    assert captured_sizes(manifest, (300,)) == (300,)


def test_a_recorder_launches_only_where_its_backend_does(launching_bundle: EngineBundle, llama_bundle: Path) -> None:
    for bundle, kind in ((launching_bundle, LaunchingCudaDecoder), (open_bundle(llama_bundle), CudaDecoder)):
        session = opened_on_host(decoder_workload(bundle, CONFIG, 1)[1], bundle, kind)
        backend = session.open(None, None)
        assert isinstance(session.watch(backend), RecordingLauncher) == (kind is LaunchingCudaDecoder)
        backend.close()


def test_other_kernels_than_those_that_were_captured_are_an_error(
    launching_bundle: EngineBundle, tmp_path: Path, silent: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds, session = decoder_workload(launching_bundle, CONFIG, 1)
    session = opened_on_host(session, launching_bundle, LaunchingCudaDecoder)
    device = StandIn(session, rename="_other")
    monkeypatch.setattr(on_device, "profiled_runs", device.runs(on_device.profiled_runs))
    session = replace(session, replay=device.replay)
    with pytest.raises(KilnError, match="k2_other instead of k2"):
        measure_on_device(kinds, session, tmp_path, silent, device.record, device.clock)


def as_of_gpu(bundle: EngineBundle) -> EngineBundle:
    backend = bundle.manifest.backend.model_copy(update={"provider": CUDA})
    return replace(bundle, manifest=bundle.manifest.model_copy(update={"backend": backend}))


def test_a_whole_profile_says_what_it_is_of(
    launching_bundle: EngineBundle, silent: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command's function to every form of its result, with a roofline that nobody measured."""
    bundle = as_of_gpu(launching_bundle)
    kinds, session = decoder_workload(bundle, CONFIG, 1)
    session = opened_on_host(session, bundle, LaunchingCudaDecoder)
    device = StandIn(session)
    session = replace(session, replay=device.replay)
    monkeypatch.setattr(on_device, "profiled_runs", device.runs(on_device.profiled_runs))
    for name, stand_in in (
        ("open_bundle", lambda path: bundle),
        ("require_torch_cuda", lambda purpose: None),
        ("CudaRuntime", HostRuntime),
        ("decoder_workload", lambda *arguments: (kinds, session)),
        ("measure_device_roofline", lambda rows, fp32: ROOF),
        ("measure_on_device", partial(measure_on_device, record=device.record, clock=device.clock)),
    ):
        monkeypatch.setattr(profiling, name, stand_in)
    found = profile(bundle.path, CONFIG, silent)
    assert (found.processor, found.threads) == ("host", None)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(tables_from_profile(found))
    text = console.export_text()
    assert f"{bundle.manifest.name} on host" in text
    assert "threads" not in text.splitlines()[0]
    assert "peak 800000 Gop/s in 16-bit" in text
    assert COPIES in text
    document = json.loads(json_from_profile(found))
    assert document["processor"] == "host"
    assert [len(phase["nodes"]) for phase in document["phases"]] == [KERNELS + 1] * 3
    spans = [event for event in json.loads(trace_from_profile(found))["traceEvents"] if event["ph"] == "X"]
    operators = [event for event in spans if event["tid"] == 2]
    assert [event["args"]["kernel"] for event in operators] == ["in", "k0", "k1", "k2", "k3", "k4", "out"] * 3
    for process in (1, 2, 3):
        (step,) = [event for event in spans if (event["pid"], event["name"]) == (process, "step")]
        ends = [event["ts"] + event["dur"] for event in operators if event["pid"] == process]
        assert max(ends) == pytest.approx(step["ts"] + step["dur"], abs=0.01)
    page = html_from_profile(found)
    assert page.count("<svg") == 4
    assert "peak in 16-bit" in page


def test_a_bundle_for_a_gpu_is_refused_where_torch_has_none(
    llama_bundle: Path, silent: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("torch has CUDA here")
    bundle = as_of_gpu(open_bundle(llama_bundle))
    monkeypatch.setattr(profiling, "open_bundle", lambda path: bundle)
    with pytest.raises(KilnError, match=r"needs torch with CUDA; torch .* finds no CUDA device"):
        profile(llama_bundle, ProfileConfig(), silent)
    with pytest.raises(KilnError, match=r"threads is 2, but .* runs on a GPU"):
        profile(llama_bundle, ProfileConfig(threads=2), silent)
