"""Building a plan: profiles are checked, a child process builds, and what it found out is kept beside the plan.

Knows files and processes; TensorRT itself is called in `engines.backends.tensorrt.child` only.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engines.backends.memory import process_memory
from engines.backends.tensorrt.api import Product
from engines.backends.tensorrt.child import LAYERS, LOG, PLAN, REQUEST, RESULT, Request, Result
from engines.backends.tensorrt.layers import EngineLayer, layers_from_file
from engines.backends.tensorrt.options import TensorRtOptions
from engines.backends.tensorrt.plugin_graph import abi_of
from engines.backends.tensorrt.profile_check import check_profiles
from engines.backends.tensorrt.profiles import Profile
from engines.sku import host_memory
from passes.onnx_model import OnnxModel, external_files, load_structure
from plugins.errors import KilnError
from plugins.paged_attention.tensorrt_plugin import Kernels

MEMORY_PER_WEIGHT, MEMORY_BASE, MEMORY_PER_PROFILE = 4.0, 400 * 2**20, 100 * 2**20
"""Peak of a build: several copies of the weights, what the libraries take themselves, and what each profile but the
first has of its own. Users report 3 to 4 times the parameters (TensorRT-Edge-LLM 30); `docs/tensorrt.md` has what was
measured here."""


@dataclass(frozen=True)
class Plan:
    """A built plan. Sizes in bytes; `timings_added` is how many the cache lacked, None where there is no cache."""

    path: Path
    tensorrt: str
    peak_memory: int
    forecast_memory: int
    memory: Mapping[str, int]
    layers: tuple[EngineLayer, ...]
    timings_before: int | None
    timings_added: int | None
    warnings: tuple[str, ...]


def forecast_build_memory(model: OnnxModel, profiles: int = 1) -> int:
    """Bytes of host memory that building will take at its peak, from the bytes of its weights and its profiles."""
    proto = load_structure(model.path)
    weights = sum(file.stat().st_size for file in [model.path, *external_files(model.path, proto)])
    return int(MEMORY_BASE + MEMORY_PER_WEIGHT * weights + MEMORY_PER_PROFILE * (profiles - 1))


def profiles_digest(profiles: Sequence[Profile]) -> str:
    """SHA-256 of names and sizes."""
    return hashlib.sha256(json.dumps([asdict(profile) for profile in profiles], sort_keys=True).encode()).hexdigest()


def build_plan(
    model: OnnxModel,
    profiles: Sequence[Profile],
    options: TensorRtOptions,
    folder: Path,
    *,
    parsed: Path | None = None,
    kernels: Kernels | None = None,
    least: Sequence[int] = (),
    product: Product = "tensorrt",
    inspect: bool = False,
    observe: Callable[[str], None] = lambda phase: None,
) -> Plan:
    """Write plan, timing cache, log and layers into `folder`, which exists. `observe` hears of each phase.

    `parsed` is the same graph in operators that only TensorRT's parser knows, where there are such; `kernels` are those
    of the attention plug-in, where the graph has layers of it, and `least` the oldest TensorRT that has its operators.

    Raises KilnError: for a profile that the graph does not compute with, a graph that TensorRT does not take, memory
    that would not do, and a builder that crashed. The log stays in `folder`.
    """
    check_profiles(model.path, model.inputs, profiles)
    forecast = forecast_build_memory(model, len(profiles))
    if forecast > host_memory():
        raise KilnError(
            f"building {model.path} will take about {forecast / 2**30:.1f} GiB of host memory, this machine has "
            f"{host_memory() / 2**30:.1f} GiB; build on a larger one, or a smaller model"
        )
    shapes = [{tensor.name: profile.shapes(tensor) for tensor in model.inputs} for profile in profiles]
    if kernels is not None:
        abi_of(model.path)
        kernels.ptx()  # compiled, and where that fails said, before a builder is started
    own = None if kernels is None else asdict(kernels)
    request = Request(product, str((parsed or model.path).resolve()), shapes, options.to_dict(), own, least, inspect)
    (folder / REQUEST).write_text(json.dumps(asdict(request)), encoding="utf-8")
    code, peak = _run_child(folder, observe)
    result = _result(folder, code, peak, forecast)
    for file in (REQUEST, RESULT):
        (folder / file).unlink()
    return Plan(
        folder / PLAN,
        result.tensorrt,
        result.peak_memory,
        forecast,
        result.memory,
        layers_from_file(folder / LAYERS),
        result.timings_before,
        result.timings_added,
        tuple(result.warnings),
    )


def _run_child(folder: Path, observe: Callable[[str], None]) -> tuple[int, int]:
    """Its exit code, negative for a signal, and its peak memory in bytes as far as it was seen."""
    root, peak = str(Path(__file__).parents[3]), 0
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, "-m", "engines.backends.tensorrt.child", str(folder)]
    with (
        (folder / LOG).open("ab") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                peak = max(peak, int(process_memory("VmHWM", process.pid) or 0))
                observe(line.strip())
        except BaseException:  # an interrupt: nobody waits for this plan
            process.kill()
            raise
    return process.returncode, peak


def _result(folder: Path, code: int, peak: int, forecast: int) -> Result:
    log = folder / LOG
    if (folder / RESULT).is_file():
        result = Result(**json.loads((folder / RESULT).read_text(encoding="utf-8")))
        if result.error is not None:
            raise KilnError(result.error)
        if code == 0:
            return result
    used = f"it had taken {peak / 2**30:.1f} GiB; {forecast / 2**30:.1f} GiB were forecast"
    if code == -signal.SIGKILL:
        raise KilnError(
            f"the process that built the engine was killed, most likely for want of memory: {used}. Close what else "
            f"runs, lower --trt-workspace, or build on a larger machine; its log is {log}"
        )
    how = f"with signal {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    raise KilnError(f"TensorRT's builder ended {how} after {_last_line(log)!r}; {used}. Its log is {log}")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return lines[-1][:200] if lines else "nothing"
