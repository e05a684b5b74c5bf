"""The process that builds one plan: `python -m engines.backends.tensorrt.child FOLDER`.

Reads FOLDER/request.json, writes the plan and what was found out beside it, and last FOLDER/result.json. A process of
its own, because a builder takes several times the weights' memory and its crash must not be ours. Lines on standard
output say what it is doing; nobody else calls this module.
"""

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines.backends.memory import process_memory
from engines.backends.tensorrt.api import IBuilderConfig, ITimingCache, Product, TensorRt, tensorrt_module
from engines.backends.tensorrt.layers import layers_from_log, layers_to_file, memory_from_log
from engines.backends.tensorrt.log import BuildLog, log_to_file, logger_for
from engines.backends.tensorrt.options import TensorRtOptions, options_from_dict
from plugins.errors import KilnError
from plugins.paged_attention.tensorrt_plugin import Kernels, register

REQUEST, RESULT = "request.json", "result.json"
PLAN, CACHE, LOG, LAYERS, INSPECTED = "engine.plan", "timing.cache", "build.log", "layers.json", "inspector.json"


@dataclass(frozen=True)
class Request:
    """What to build. `profiles` are, in order, least, best and most shape of each input by name.

    `kernels` are the fields of `tensorrt_plugin.Kernels`, for a graph with layers of the attention plug-in; `least` is
    the oldest TensorRT, major and minor, that has the graph's operators.
    """

    product: Product
    model: str
    profiles: Sequence[Mapping[str, Sequence[Sequence[int]]]]
    options: Mapping[str, Any]
    kernels: Mapping[str, Any] | None = None
    least: Sequence[int] = ()
    inspect: bool = False
    """Load the plan and ask TensorRT's own inspector, which needs the GPU that it was built for."""


@dataclass(frozen=True)
class Result:
    """What came of it. `error` is the message of a KilnError; sizes in bytes."""

    tensorrt: str = ""
    error: str | None = None
    layer: str | None = None
    plan_bytes: int = 0
    peak_memory: int = 0
    memory: Mapping[str, int] = ()  # type: ignore[assignment]
    timings_before: int | None = None
    timings_added: int | None = None
    warnings: Sequence[str] = ()


def build_in_this_process(folder: Path, request: Request) -> Result:
    """Parse and build. Raises KilnError with TensorRT's reason."""
    trt = tensorrt_module(request.product)
    if request.product == "tensorrt":
        _refuse_older(trt.__version__, request.least)
    options = options_from_dict(request.options)
    log = log_to_file(folder / LOG)
    logger = logger_for(trt, log)
    builder = trt.Builder(logger)
    kinds = trt.NetworkDefinitionCreationFlag
    flags = 1 << int(kinds.STRONGLY_TYPED)
    if request.kernels is not None:
        register(importlib.import_module(f"{request.product}.plugin"), Kernels(**request.kernels))
        flags |= 1 << int(kinds.PREFER_AOT_PYTHON_PLUGINS)
    network = builder.create_network(flags)
    if network is None:
        raise log.error("make a network", f"the whole log is {folder / LOG}")
    parser = trt.OnnxParser(network, logger)
    _say("parse")
    if not parser.parse_from_file(request.model):
        raise _parse_error(parser, request.model, log)
    config = builder.create_builder_config()
    _configure(trt, config, options)
    if request.kernels is not None:
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    for number, shapes in enumerate(request.profiles):
        profile = builder.create_optimization_profile()
        for name, (least, best, most) in shapes.items():
            profile.set_shape(name, tuple(least), tuple(best), tuple(most))
        if config.add_optimization_profile(profile) < 0:
            raise log.error(f"take profile {number}", "correct its sizes")
    cache = _timing_cache(config, options, log)
    before = _timings(cache)
    monitor = _monitor(trt)
    config.progress_monitor = monitor
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise log.error("build the engine", f"the whole log is {folder / LOG}")
    (folder / PLAN).write_bytes(memoryview(plan))  # type: ignore[arg-type]
    if cache is not None:
        (folder / CACHE).write_bytes(memoryview(cache.serialize()))  # type: ignore[arg-type]
    after = _timings(cache)
    lines = (folder / LOG).read_text(encoding="utf-8").splitlines()
    layers_to_file(folder / LAYERS, layers_from_log(lines))
    if request.inspect:
        _inspect(trt, log, folder)
    return Result(
        tensorrt=trt.__version__,
        plan_bytes=plan.nbytes,
        memory=memory_from_log(lines),
        timings_before=None if before is None else len(before),
        timings_added=None if before is None or after is None else len(after - before),
        warnings=log.warnings,
    )


def _refuse_older(version: str, least: Sequence[int]) -> None:
    if [int(part) for part in version.split(".")[:2]] < list(least):
        raise KilnError(
            f"found TensorRT {version}; a decoder without plug-in needs {'.'.join(map(str, least))} or newer, for its "
            "attention over sequences of their own lengths: update it, or build with --attention plugin"
        )


def _configure(trt: TensorRt, config: IBuilderConfig, options: TensorRtOptions) -> None:
    config.clear_flag(trt.BuilderFlag.TF32)  # TensorRT sets it by itself
    for flag in options.flags:
        config.set_flag(getattr(trt.BuilderFlag, flag))
    if options.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace)
    config.builder_optimization_level = options.optimization_level
    if options.hardware != "this":
        config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, options.hardware_level)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED


def _timing_cache(config: IBuilderConfig, options: TensorRtOptions, log: BuildLog) -> ITimingCache | None:
    """None where the product keeps none. Raises KilnError for a file that is not this machine's."""
    stored = b""
    if options.timing_cache is not None:
        try:
            stored = options.timing_cache.read_bytes()
        except OSError as error:
            raise KilnError(f"the timing cache {options.timing_cache} cannot be read: {error.strerror}") from error
    cache = config.create_timing_cache(stored)
    if cache is None or not config.set_timing_cache(cache, False):
        if stored:
            raise log.error(
                f"use the timing cache {options.timing_cache}",
                "it belongs to another GPU, driver or TensorRT, or is damaged: leave --trt-timing-cache out",
            )
        return None
    return cache


def _timings(cache: ITimingCache | None) -> set[str] | None:
    return None if cache is None else {str(key) for key in cache.queryKeys()}


def _inspect(trt: TensorRt, log: BuildLog, folder: Path) -> None:
    runtime = trt.Runtime(logger_for(trt, log))
    engine = runtime.deserialize_cuda_engine((folder / PLAN).read_bytes())
    if engine is None:
        raise log.error("open the engine that it has just built", "see the log")
    information = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    (folder / INSPECTED).write_text(information, encoding="utf-8")


def _parse_error(parser: Any, model: str, log: BuildLog) -> KilnError:
    said = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        name, operator = error.node_name(), error.node_operator()
        where = f"node {name or error.node()} ({operator})" if operator else "the model"
        log.errors.insert(0, f"Invalid Node - {name}" if name else error.desc())
        said.append(f"{where}: {BuildLog(errors=[error.desc()]).cause}")
    reason = "; ".join(said[:3]) or log.cause
    return KilnError(f"TensorRT cannot take {model}: {reason}")


def _monitor(trt: TensorRt) -> Any:
    base: Any = trt.IProgressMonitor

    class _Monitor(base):
        def __init__(self) -> None:
            base.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            _say(phase_name)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return True

        def phase_finish(self, phase_name: str) -> None:
            pass

    return _Monitor()


def _say(text: str) -> None:
    print(text, flush=True)


def main(folder: Path) -> int:
    request = Request(**json.loads((folder / REQUEST).read_text(encoding="utf-8")))
    try:
        result, code = build_in_this_process(folder, request), 0
    except KilnError as error:
        result, code = Result(error=str(error)), 2
    document = {**asdict(result), "memory": dict(result.memory), "peak_memory": int(process_memory("VmHWM") or 0)}
    (folder / RESULT).write_text(json.dumps(document), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
