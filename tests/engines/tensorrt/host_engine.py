"""A stand-in for a deserialised TensorRT engine in host memory: what runs it is tested without a GPU.

It has the calls of `engines.backends.tensorrt.api` that running needs, takes sizes as its profiles do, reads and writes
the addresses that it was given, and computes with whatever evaluates the ONNX graph.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import ml_dtypes  # noqa: F401
import numpy as np
from numpy.typing import NDArray

from engines.backends.tensorrt.loading import OpenedEngine
from engines.backends.tensorrt.log import BuildLog
from engines.backends.tensorrt.profiles import Profile
from passes.onnx_model import OnnxModel, Tensor

LAYERS = {"fc_myl0_3": 0.25, "conv1_myl0_2": 0.5}
"""What is reported of each run: names and milliseconds."""
Evaluate = Callable[[dict[str, NDArray]], Mapping[str, NDArray]]
INPUT, OUTPUT = "INPUT", "OUTPUT"
TRT = SimpleNamespace(
    TensorIOMode=SimpleNamespace(INPUT=INPUT, OUTPUT=OUTPUT),
    nptype=lambda kind: np.dtype(kind),
    IOutputAllocator=object,
    IProfiler=object,
)


class HostEngine:
    def __init__(self, model: OnnxModel, profiles: Sequence[Profile], evaluate: Evaluate) -> None:
        self.tensors = {tensor.name: tensor for tensor in (*model.inputs, *model.outputs)}
        self.names, self.inputs = list(self.tensors), {tensor.name for tensor in model.inputs}
        self.profiles, self.evaluate = profiles, evaluate
        self.num_io_tensors, self.num_optimization_profiles = len(self.names), len(profiles)
        self.contexts: list[HostContext] = []

    def opened(self) -> OpenedEngine:
        return OpenedEngine(TRT, BuildLog(), None, self)  # type: ignore[arg-type]

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> str:
        return INPUT if name in self.inputs else OUTPUT

    def get_tensor_dtype(self, name: str) -> str:
        return self.tensors[name].dtype

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else -1 for size in self.tensors[name].shape)

    def create_execution_context(self) -> "HostContext":
        self.contexts.append(HostContext(self))
        return self.contexts[-1]


class HostContext:
    def __init__(self, engine: HostEngine) -> None:
        self.engine, self.profile, self.runs = engine, 0, 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.allocators: dict[str, object] = {}
        self.profiler: object = None
        self.enqueue_emits_profile = True
        self.reports = True

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self.profile = profile_index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self.engine.profiles[self.profile].shapes(self.engine.tensors[name])
        self.shapes[name] = shape
        return all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True))

    def infer_shapes(self) -> list[str]:
        return [name for name in self.engine.inputs if name not in self.shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self.shapes:
            return self.shapes[name]
        symbols: dict[str, int] = {}
        for known, shape in self.shapes.items():
            symbols |= {
                s: n for s, n in zip(self.engine.tensors[known].shape, shape, strict=True) if isinstance(s, str)
            }
        return tuple(
            size if isinstance(size, int) else symbols.get(size, -1) for size in self.engine.tensors[name].shape
        )

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert memory % 256 == 0, "TensorRT wants aligned addresses"
        self.addresses[name] = memory
        return True

    def set_output_allocator(self, name: str, output_allocator: object) -> bool:
        self.allocators[name] = output_allocator
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        self.runs += 1
        feeds = {name: self._read(self.engine.tensors[name]) for name in self.engine.inputs}
        for name, values in self.engine.evaluate(feeds).items():
            values = np.ascontiguousarray(values)
            allocator = self.allocators.get(name)
            if allocator is not None:
                place = allocator.reallocate_output_async(name, 0, values.nbytes, 256, stream_handle)  # type: ignore[attr-defined]
                allocator.notify_shape(name, values.shape)  # type: ignore[attr-defined]
            else:
                place = self.addresses[name]
                assert values.shape == self.get_tensor_shape(name)
            ctypes.memmove(place, values.ctypes.data, values.nbytes)
        return True

    def report_to_profiler(self) -> bool:
        assert not self.enqueue_emits_profile, "each run would be reported twice"
        for name, milliseconds in LAYERS.items():
            self.profiler.report_layer_time(name, milliseconds)  # type: ignore[attr-defined]
        return self.reports

    def _read(self, tensor: Tensor) -> NDArray:
        shape, dtype = self.shapes[tensor.name], np.dtype(tensor.dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        return np.frombuffer(ctypes.string_at(self.addresses[tensor.name], size), dtype).reshape(shape)
