"""Runs a deserialised engine: an execution context for each profile, fixed buffers, captured graphs.

Everything goes to the stream of one `Runtime`, which is `plugins.cuda_runtime.CudaRuntime`; tests give one in host
memory. Inputs and outputs have buffers here, large enough for every profile, so that what was captured stays where it
is; tensors that a caller keeps on the device itself, such as caches, come with their addresses. An output whose shape
depends on values gets its memory from an allocator when its size is known. Knows neither models nor steps.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401 (NumPy then knows bfloat16 by name)
import numpy as np
from numpy.typing import NDArray

from engines.backends.cuda_memory import DeviceMemory, PinnedMemory, Runtime
from engines.backends.tensorrt.api import ICudaEngine, IExecutionContext, TensorRt
from engines.backends.tensorrt.layer_times import LayerTimes
from engines.backends.tensorrt.loading import OpenedEngine
from engines.backends.tensorrt.profiles import Profile, Shape, profile_for
from engines.runtime.info import TensorInfo
from passes.onnx_model import Tensor
from plugins.errors import KilnError

_REPEATS = 3
"""Calls with one combination of shapes and addresses before it is captured."""
_GRAPHS = 32
"""Captured graphs that are kept; the one that was not used for longest goes first."""


@dataclass(frozen=True)
class Resident:
    """A tensor that stays on the device, at an address that the caller owns."""

    address: int
    shape: Shape


@dataclass(frozen=True)
class _Captured:
    """A graph for one combination. Its context is its own: another shape would change what it reads."""

    graph: int
    context: IExecutionContext
    outputs: Mapping[str, Shape]


_Key = tuple[tuple[str, Shape, int], ...]


class EngineRunner:
    """One thread calls at a time. `resident` names the tensors that the caller keeps on the device.

    With `times` nothing is captured, each run waits for its end, and the times of its layers are put there.

    Raises KilnError where the engine's profiles are not those given, a context cannot be made, or memory is short.
    """

    def __init__(
        self,
        opened: OpenedEngine,
        inputs: Sequence[Tensor],
        profiles: Sequence[Profile],
        runtime: Runtime,
        resident: Collection[str] = (),
        times: LayerTimes | None = None,
    ) -> None:
        self._times = times
        self._opened, self._profiles, self._runtime = opened, tuple(profiles), runtime
        self._tensors, self._resident = tuple(inputs), frozenset(resident)
        engine, trt = opened.engine, opened.trt
        if engine.num_optimization_profiles != len(profiles):
            raise KilnError(
                f"the engine has {engine.num_optimization_profiles} profiles, its bundle {len(profiles)}; rebuild it"
            )
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        infos = {name: _info(trt, engine, name) for name in names}
        is_input = {name: engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT for name in names}
        self.inputs = tuple(infos[name] for name in names if is_input[name])
        self.outputs = tuple(infos[name] for name in names if not is_input[name])
        runtime.enter()
        self._contexts = [self._context(number) for number in range(len(profiles))]
        self._device: dict[str, DeviceMemory] = {}
        self._host: dict[str, PinnedMemory] = {}
        self._allocators: dict[str, Any] = {}
        self._calls: Counter[_Key] = Counter()
        self._captured: OrderedDict[_Key, _Captured] = OrderedDict()
        for info in (*self.inputs, *self.outputs):
            if info.name not in self._resident:
                self._provide(info)

    def run(self, inputs: Mapping[str, NDArray], resident: Mapping[str, Resident] | None = None) -> dict[str, NDArray]:
        """Run once; the outputs that do not stay on the device are owned by the caller.

        `resident` has each tensor that was named as such. Raises KilnError for sizes that no profile takes, and with
        TensorRT's reason.
        """
        there = dict(resident or {})
        assert there.keys() == self._resident
        self._runtime.enter()
        for name, array in inputs.items():
            size = array.nbytes
            self._host[name].bytes[:size] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self._runtime.copy(self._device[name].address, self._host[name].address, size)
        shapes = {**{name: array.shape for name, array in inputs.items()}, **{n: r.shape for n, r in there.items()}}
        key = tuple(
            (info.name, shapes[info.name], there[info.name].address if info.name in there else 0)
            for info in self.inputs
        )
        found = self._replayed(key)
        if found is None:
            found = self._executed(key, shapes, there)
        return self._fetched(found)

    def close(self) -> None:
        """Free contexts, graphs and buffers. A second call does nothing."""
        self._runtime.enter()
        for captured in self._captured.values():
            self._runtime.free_graph(captured.graph)
        self._captured.clear()
        self._contexts.clear()
        for memory in (*self._device.values(), *self._host.values(), *self._allocators.values()):
            memory.close()

    def _fetched(self, shapes: Mapping[str, Shape]) -> dict[str, NDArray]:
        pieces = {}
        for info in self.outputs:
            if info.name in self._resident:
                continue
            allocator = self._allocators.get(info.name)
            if allocator is not None:
                self._runtime.synchronize()  # only now its shape and memory are known
            shape = shapes[info.name] if allocator is None else allocator.shape
            address = self._device[info.name].address if allocator is None else allocator.address
            size = int(np.prod(shape, dtype=np.int64)) * np.dtype(info.dtype).itemsize
            if allocator is not None:
                self._pin(info.name, size)
            if size:
                self._runtime.copy(self._host[info.name].address, address, size)
            pieces[info.name] = (size, shape, info.dtype)
        self._runtime.synchronize()
        return {
            name: self._host[name].bytes[:size].copy().view(dtype).reshape(shape)
            for name, (size, shape, dtype) in pieces.items()
        }

    def _executed(
        self, key: _Key, shapes: Mapping[str, Shape], resident: Mapping[str, Resident]
    ) -> Mapping[str, Shape]:
        """Run and, where this comes again, capture. Gives the outputs' shapes."""
        number = profile_for(self._profiles, self._tensors, shapes)
        found = self._bind(self._contexts[number], shapes, resident)
        self._enqueue(self._contexts[number])
        self._calls[key] += 1
        if self._calls[key] == _REPEATS and not self._allocators and self._times is None:
            self._capture(key, number, shapes, resident)
        return found

    def _capture(self, key: _Key, number: int, shapes: Mapping[str, Shape], resident: Mapping[str, Resident]) -> None:
        context = self._context(number)
        found = self._bind(context, shapes, resident)
        self._enqueue(context)  # the first call after a change of shapes does more than the graph may hold
        self._runtime.synchronize()
        graph = self._runtime.capture(lambda: self._enqueue(context))
        self._captured[key] = _Captured(graph, context, found)
        if len(self._captured) > _GRAPHS:
            oldest, captured = self._captured.popitem(last=False)
            self._runtime.free_graph(captured.graph)
            del self._calls[oldest]

    def _replayed(self, key: _Key) -> Mapping[str, Shape] | None:
        if key not in self._captured:
            return None
        self._captured.move_to_end(key)
        self._runtime.launch(self._captured[key].graph)
        return self._captured[key].outputs

    def _context(self, number: int) -> IExecutionContext:
        context = self._opened.engine.create_execution_context()
        if context is None or not context.set_optimization_profile_async(number, self._runtime.address):
            name = self._profiles[number].name
            raise self._opened.log.error(
                f"make a context for profile {name}", "free device memory, or use fewer profiles"
            )
        if self._times is not None:
            context.profiler, context.enqueue_emits_profile = self._times.profiler(self._opened.trt), False
        return context

    def _bind(
        self, context: IExecutionContext, shapes: Mapping[str, Shape], resident: Mapping[str, Resident]
    ) -> dict[str, Shape]:
        for info in self.inputs:
            if not context.set_input_shape(info.name, tuple(shapes[info.name])):
                raise self._failed(f"take input {info.name} of shape {list(shapes[info.name])}")
        if lacking := context.infer_shapes():
            raise self._failed(f"infer shapes: it lacks {', '.join(lacking)}")
        found = {}
        for info in (*self.inputs, *self.outputs):
            if info.name in self._allocators:
                bound = context.set_output_allocator(info.name, self._allocators[info.name])
            elif info.name in resident:
                bound = context.set_tensor_address(info.name, resident[info.name].address)
            else:
                bound = context.set_tensor_address(info.name, self._device[info.name].address)
                found[info.name] = tuple(context.get_tensor_shape(info.name))
            if not bound:
                raise self._failed(f"bind {info.name}")
        return found

    def _enqueue(self, context: IExecutionContext) -> None:
        if not context.execute_async_v3(self._runtime.address):
            raise self._failed("run the engine")
        if self._times is not None:
            self._runtime.synchronize()
            self._times.begin()
            if not context.report_to_profiler():
                raise self._failed("report the times of its layers")

    def _provide(self, info: TensorInfo) -> None:
        """Memory for a tensor at the largest sizes of any profile, on both sides; an allocator where none is known."""
        tensors = {tensor.name: tensor for tensor in self._tensors}
        if info.name in tensors:
            largest = [profile.shapes(tensors[info.name])[2] for profile in self._profiles]
        else:
            largest = [self._largest_output(number, info.name) for number in range(len(self._profiles))]
        if any(size < 0 for shape in largest for size in shape):
            self._allocators[info.name] = _allocator(self._opened.trt, self._runtime, info.name)
            return
        size = max(int(np.prod(shape, dtype=np.int64)) for shape in largest) * np.dtype(info.dtype).itemsize
        self._device[info.name] = DeviceMemory(self._runtime, size, f"tensor {info.name}")
        self._pin(info.name, size)

    def _pin(self, name: str, size: int) -> None:
        if name in self._host and self._host[name].size >= size:
            return
        if name in self._host:
            self._host[name].close()
        self._host[name] = PinnedMemory(self._runtime, size, f"tensor {name}")

    def _largest_output(self, number: int, name: str) -> Shape:
        context, profile = self._contexts[number], self._profiles[number]
        for tensor in self._tensors:
            context.set_input_shape(tensor.name, profile.shapes(tensor)[2])
        context.infer_shapes()
        return tuple(context.get_tensor_shape(name))

    def _failed(self, doing: str) -> KilnError:
        return self._opened.log.error(doing, "report it with the model; the bundle's build.log says how it was built")


def _info(trt: TensorRt, engine: ICudaEngine, name: str) -> TensorInfo:
    shape = tuple(None if size < 0 else int(size) for size in engine.get_tensor_shape(name))
    kind = engine.get_tensor_dtype(name)
    dtype = "bfloat16" if getattr(kind, "name", "") == "BF16" else np.dtype(trt.nptype(kind)).name
    return TensorInfo(name, dtype, shape)


def _allocator(trt: TensorRt, runtime: Runtime, name: str) -> Any:
    """An IOutputAllocator with memory that grows. Nothing is raised in it: its calls cross C++."""
    base: Any = trt.IOutputAllocator

    class _Allocator(base):
        def __init__(self) -> None:
            base.__init__(self)
            self.shape: Shape = ()
            self._memory: DeviceMemory | None = None

        @property
        def address(self) -> int:
            return 0 if self._memory is None else self._memory.address

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            try:
                if self._memory is None or self._memory.size < size:
                    self.close()
                    self._memory = DeviceMemory(runtime, max(size, 1), f"output {name}")
            except KilnError:
                return 0  # TensorRT then fails with an error of its own
            return self._memory.address

        def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            return self.reallocate_output(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Sequence[int]) -> None:
            self.shape = tuple(shape)

        def close(self) -> None:
            if self._memory is not None:
                self._memory.close()
                self._memory = None

    return _Allocator()
