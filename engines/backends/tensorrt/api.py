"""TensorRT's Python interface, as far as Kiln calls it: names, arguments and results as its own module has them.

The rest of this folder is checked against these declarations by mypy, and they are compared with the real modules by
tests/engines/tensorrt/test_contract.py: a call that TensorRT lacks cannot go unseen. `tensorrt_rtx` is the same
interface under another name. Holds no code but the choice of the module.
"""

import importlib
from collections.abc import Sequence
from typing import Any, Literal, Protocol, get_args

from plugins.errors import KilnError

Product = Literal["tensorrt", "tensorrt_rtx"]
"""Name of the Python module."""
Attention = Literal["plugin", "native"]
"""Of a decoder: Kiln's own plug-in over a paged cache, or TensorRT's own layers over a linear one."""
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
OLDEST, BEYOND = (10, 13), 12
"""Versions of `tensorrt` that Kiln was written for: from OLDEST up to, but without, major version BEYOND."""
INSTALL = {"tensorrt": "pip install tensorrt", "tensorrt_rtx": "pip install tensorrt-rtx"}


class ILogger(Protocol):
    def log(self, severity: Any, msg: str) -> None: ...


class IProgressMonitor(Protocol):
    def phase_start(self, phase_name: str, parent_phase: str, num_steps: int) -> None: ...
    def step_complete(self, phase_name: str, step: int) -> bool: ...
    def phase_finish(self, phase_name: str) -> None: ...


class IHostMemory(Protocol):
    """Supports the buffer protocol."""

    @property
    def nbytes(self) -> int: ...


class IOptimizationProfile(Protocol):
    def set_shape(self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]) -> None: ...


class ITimingCache(Protocol):
    def serialize(self) -> IHostMemory: ...
    def queryKeys(self) -> list[Any]: ...  # noqa: N802


class IBuilderConfig(Protocol):
    builder_optimization_level: int
    hardware_compatibility_level: Any
    profiling_verbosity: Any
    progress_monitor: IProgressMonitor

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int: ...
    def set_flag(self, flag: Any) -> None: ...
    def set_preview_feature(self, feature: Any, enable: bool) -> None: ...
    def clear_flag(self, flag: Any) -> None: ...
    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None: ...
    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache: ...
    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool: ...
    def get_timing_cache(self) -> ITimingCache | None: ...


class INetworkDefinition(Protocol):
    @property
    def num_layers(self) -> int: ...


class Builder(Protocol):
    def __init__(self, logger: ILogger) -> None: ...
    def create_network(self, flags: int = 0) -> INetworkDefinition | None: ...
    def create_builder_config(self) -> IBuilderConfig: ...
    def create_optimization_profile(self) -> IOptimizationProfile: ...
    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> IHostMemory | None: ...


class ParserError(Protocol):
    def code(self) -> Any: ...
    def desc(self) -> str: ...
    def node(self) -> int: ...
    def node_name(self) -> str: ...
    def node_operator(self) -> str: ...


class OnnxParser(Protocol):
    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None: ...
    @property
    def num_errors(self) -> int: ...
    def parse_from_file(self, model: str) -> bool: ...
    def get_error(self, index: int) -> ParserError: ...


class EngineInspector(Protocol):
    def get_engine_information(self, format: Any) -> str: ...


class IProfiler(Protocol):
    def report_layer_time(self, layer_name: str, ms: float) -> None: ...


class IExecutionContext(Protocol):
    profiler: IProfiler
    enqueue_emits_profile: bool

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool: ...
    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...
    def get_tensor_shape(self, name: str) -> Sequence[int]: ...
    def set_tensor_address(self, name: str, memory: int) -> bool: ...
    def set_output_allocator(self, name: str, output_allocator: Any) -> bool: ...
    def infer_shapes(self) -> list[str]: ...
    def execute_async_v3(self, stream_handle: int) -> bool: ...
    def report_to_profiler(self) -> bool: ...


class ICudaEngine(Protocol):
    weight_streaming_budget_v2: int

    @property
    def num_io_tensors(self) -> int: ...
    @property
    def num_optimization_profiles(self) -> int: ...
    def get_tensor_name(self, index: int) -> str: ...
    def get_tensor_mode(self, name: str) -> Any: ...
    def get_tensor_shape(self, name: str) -> Sequence[int]: ...
    def get_tensor_dtype(self, name: str) -> Any: ...
    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Sequence[int]]: ...
    def create_execution_context(self) -> IExecutionContext | None: ...
    def create_engine_inspector(self) -> EngineInspector: ...


class Runtime(Protocol):
    engine_host_code_allowed: bool

    def __init__(self, logger: ILogger) -> None: ...
    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None: ...


class Refitter(Protocol):
    def __init__(self, engine: ICudaEngine, logger: ILogger) -> None: ...
    def get_missing_weights(self) -> list[str]: ...
    def refit_cuda_engine(self) -> bool: ...


class OnnxParserRefitter(Protocol):
    def __init__(self, refitter: Refitter, logger: ILogger) -> None: ...
    def refit_from_file(self, model: str) -> bool: ...


class TensorRt(Protocol):
    """The module. Members of its enumerations are listed in `ENUMERATIONS`."""

    __version__: str
    Builder: type[Builder]
    OnnxParser: type[OnnxParser]
    Runtime: type[Runtime]
    Refitter: type[Refitter]
    OnnxParserRefitter: type[OnnxParserRefitter]
    ILogger: Any
    IOutputAllocator: Any
    IProfiler: Any
    IProgressMonitor: Any
    BuilderFlag: Any
    HardwareCompatibilityLevel: Any
    LayerInformationFormat: Any
    MemoryPoolType: Any
    NetworkDefinitionCreationFlag: Any
    PreviewFeature: Any
    ProfilingVerbosity: Any
    TensorIOMode: Any

    def nptype(self, trt_type: Any) -> type: ...


CLASSES: tuple[type, ...] = (
    *(ILogger, IProgressMonitor, IHostMemory, IOptimizationProfile, ITimingCache, IBuilderConfig, INetworkDefinition),
    *(Builder, ParserError, OnnxParser, EngineInspector, IProfiler, IExecutionContext, ICudaEngine, Runtime, Refitter),
    OnnxParserRefitter,
)
ENUMERATIONS: dict[str, tuple[str, ...]] = {
    "BuilderFlag": (
        *("REFIT", "REFIT_IDENTICAL", "STRIP_PLAN", "WEIGHT_STREAMING", "VERSION_COMPATIBLE"),
        *("EXCLUDE_LEAN_RUNTIME", "EDITABLE_TIMING_CACHE", "ERROR_ON_TIMING_CACHE_MISS", "DISTRIBUTIVE_INDEPENDENCE"),
        "TF32",
    ),
    "HardwareCompatibilityLevel": ("NONE", "AMPERE_PLUS", "SAME_COMPUTE_CAPABILITY"),
    "LayerInformationFormat": ("JSON",),
    "MemoryPoolType": ("WORKSPACE",),
    "NetworkDefinitionCreationFlag": ("STRONGLY_TYPED", "PREFER_AOT_PYTHON_PLUGINS"),
    "PreviewFeature": ("ALIASED_PLUGIN_IO_10_03",),
    "ProfilingVerbosity": ("DETAILED",),
    "TensorIOMode": ("INPUT", "OUTPUT"),
}


def tensorrt_module(product: Product = "tensorrt") -> TensorRt:
    """Import it. Raises KilnError saying what is missing, which version is expected, and how to install it."""
    try:
        module: Any = importlib.import_module(product)
    except ImportError as error:
        raise KilnError(
            f"cannot import {product} ({error}); install it for this machine's CUDA: {INSTALL[product]}, or build for "
            "ONNX Runtime: --backend onnxruntime"
        ) from error
    major, minor = (int(part) for part in module.__version__.split(".")[:2])
    if product == "tensorrt" and not ((major, minor) >= OLDEST and major < BEYOND):
        raise KilnError(
            f"found TensorRT {module.__version__}; Kiln builds with {'.'.join(map(str, OLDEST))} to {BEYOND - 1}.x: "
            f"{INSTALL[product]}"
        )
    found: TensorRt = module
    return found
