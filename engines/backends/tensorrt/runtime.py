"""Executes a plan: one execution context for each optimisation profile, device buffers of its own, CUDA graphs.

Inputs and outputs of models without a KV cache (`TensorRtModel`, an `InferBackend`). Buffers and streams are torch's:
it manages device memory well, and TensorRT wants addresses only. A CUDA graph is captured for a shape that comes again,
since decode steps repeat theirs. Not executed on the machines that Kiln is tested on: docs/tensorrt.md says which
command checks it.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.backends.checking import check_inputs
from engines.backends.tensorrt.api import ICudaEngine, IExecutionContext, Product, Runtime, TensorRt, tensorrt_module
from engines.backends.tensorrt.key import EngineKey, refuse_mismatch
from engines.backends.tensorrt.log import BuildLog, logger_for
from engines.backends.tensorrt.profiles import Profile, Shape, profile_for
from engines.runtime.info import TensorInfo
from passes.onnx_model import Tensor
from plugins.errors import KilnError

_REPEATS = 3
"""Calls with one combination of shapes before it is captured."""
_GRAPHS = 8
"""Captured graphs that are kept; the one that was not used for longest goes first."""


@dataclass(frozen=True)
class _Captured:
    """A CUDA graph for one combination of shapes. Its context is its own: another shape would change what it reads."""

    graph: Any
    context: IExecutionContext
    outputs: Mapping[str, Shape]


@dataclass(frozen=True)
class OpenedEngine:
    """`log` holds what TensorRT says while it runs. `runtime` must outlive `engine`."""

    trt: TensorRt
    log: BuildLog
    runtime: Runtime
    engine: ICudaEngine


def open_engine(
    plan: Path,
    built: EngineKey,
    here: EngineKey,
    *,
    weights: Path | None = None,
    streaming_budget: int | None = None,
    product: Product = "tensorrt",
) -> OpenedEngine:
    """Deserialise a plan whose key belongs here; `weights` is the ONNX model that a plan without weights is refitted
    from, `streaming_budget` the bytes of weights that stay on the GPU.

    Raises KilnError before deserialising where the keys differ, and with TensorRT's reason where it fails.
    """
    refuse_mismatch(built, here, plan)
    trt, log = tensorrt_module(product), BuildLog()
    logger = logger_for(trt, log)
    runtime = trt.Runtime(logger)
    runtime.engine_host_code_allowed = built.version_compatible
    engine = runtime.deserialize_cuda_engine(plan.read_bytes())
    if engine is None:
        raise log.error(f"open {plan}", "rebuild the bundle on this machine")
    if weights is not None:
        refitter = trt.Refitter(engine, logger)
        refitted = trt.OnnxParserRefitter(refitter, logger).refit_from_file(str(weights))
        missing = refitter.get_missing_weights() if refitted else []
        if not refitted or missing or not refitter.refit_cuda_engine():
            lacking = f"; without values are {', '.join(missing[:3])}" if missing else ""
            raise log.error(f"put the weights of {weights} into {plan}{lacking}", "rebuild the bundle")
    if streaming_budget is not None:
        engine.weight_streaming_budget_v2 = streaming_budget
    return OpenedEngine(trt, log, runtime, engine)


class TensorRtModel:
    """Implements `InferBackend`. One thread calls `infer` at a time.

    Raises KilnError where the engine's profiles are not those given, or a context cannot be made.
    """

    def __init__(self, opened: OpenedEngine, inputs: Sequence[Tensor], profiles: Sequence[Profile]) -> None:
        import torch

        self._torch, self._opened, self._profiles = torch, opened, tuple(profiles)
        self._tensors = tuple(inputs)
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
        self._stream = torch.cuda.Stream()
        self._contexts = [self._context(number) for number in range(len(profiles))]
        self._buffers = {info.name: self._buffer(info) for info in (*self.inputs, *self.outputs)}
        self._calls: Counter[tuple[Shape, ...]] = Counter()
        self._captured: OrderedDict[tuple[Shape, ...], _Captured] = OrderedDict()

    def check(self, inputs: Mapping[str, NDArray]) -> None:
        """Raise KilnError naming a missing, unknown, mis-shaped or mis-typed input. Types are not converted."""
        check_inputs(self.inputs, inputs)
        profile_for(self._profiles, self._tensors, {name: array.shape for name, array in inputs.items()})

    def infer(self, inputs: Mapping[str, NDArray]) -> dict[str, NDArray]:
        """Run once; the outputs are owned by the caller."""
        self.check(inputs)
        shapes = tuple(inputs[info.name].shape for info in self.inputs)
        with self._torch.cuda.stream(self._stream):
            for info in self.inputs:
                self._view(info.name, inputs[info.name].shape).copy_(
                    self._torch.from_numpy(np.ascontiguousarray(inputs[info.name])), non_blocking=True
                )
            found = self._replayed(shapes) or self._executed(shapes)
            results = {name: self._view(name, shape).cpu().numpy() for name, shape in found.items()}
        self._stream.synchronize()
        return results

    def close(self) -> None:
        """Free contexts, graphs and buffers. The backend is unusable afterwards; a second call does nothing."""
        self._captured.clear()
        self._contexts.clear()
        self._buffers.clear()

    def _context(self, number: int) -> IExecutionContext:
        context = self._opened.engine.create_execution_context()
        if context is None or not context.set_optimization_profile_async(number, self._stream.cuda_stream):
            name = self._profiles[number].name
            raise self._opened.log.error(
                f"make a context for profile {name}", "free device memory, or use fewer profiles"
            )
        return context

    def _executed(self, shapes: tuple[Shape, ...]) -> Mapping[str, Shape]:
        """Run and, where these shapes come again, capture. Gives the outputs' shapes."""
        named = {info.name: shape for info, shape in zip(self.inputs, shapes, strict=True)}
        number = profile_for(self._profiles, self._tensors, named)
        found = self._bind(self._contexts[number], named)
        self._enqueue(self._contexts[number])
        self._calls[shapes] += 1
        if self._calls[shapes] == _REPEATS:
            self._capture(shapes, number, named)
        return found

    def _capture(self, shapes: tuple[Shape, ...], number: int, named: Mapping[str, Shape]) -> None:
        context = self._context(number)
        found = self._bind(context, named)
        self._enqueue(context)  # the first call after a change of shapes does more than the graph may hold
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph, stream=self._stream):
            self._enqueue(context)
        self._captured[shapes] = _Captured(graph, context, found)
        if len(self._captured) > _GRAPHS:
            self._calls.pop(self._captured.popitem(last=False)[0])

    def _replayed(self, shapes: tuple[Shape, ...]) -> Mapping[str, Shape] | None:
        if shapes not in self._captured:
            return None
        self._captured.move_to_end(shapes)
        self._captured[shapes].graph.replay()
        return self._captured[shapes].outputs

    def _bind(self, context: IExecutionContext, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        for info in self.inputs:
            if not context.set_input_shape(info.name, tuple(shapes[info.name])):
                raise self._failed(f"take input {info.name} of shape {list(shapes[info.name])}")
        if lacking := context.infer_shapes():
            raise self._failed(f"infer shapes: it lacks {', '.join(lacking)}")
        found = {}
        for info in (*self.inputs, *self.outputs):
            shape = tuple(context.get_tensor_shape(info.name))
            if min(shape, default=0) < 0:
                raise KilnError(
                    f"output {info.name} has a shape that depends on values, {list(shape)}; Kiln serves none"
                )
            if not context.set_tensor_address(info.name, self._view(info.name, shape).data_ptr()):
                raise self._failed(f"bind {info.name}")
            if info in self.outputs:
                found[info.name] = shape
        return found

    def _enqueue(self, context: IExecutionContext) -> None:
        if not context.execute_async_v3(self._stream.cuda_stream):
            raise self._failed("run the engine")

    def _buffer(self, info: TensorInfo) -> Any:
        """Device memory, large enough for every profile, so that captured graphs keep their addresses."""
        return self._torch.empty(self._most(info), dtype=getattr(self._torch, info.dtype), device="cuda")

    def _view(self, name: str, shape: Shape) -> Any:
        return self._buffers[name][: int(np.prod(shape, dtype=np.int64))].view(shape)

    def _most(self, info: TensorInfo) -> int:
        """Elements of a tensor at the largest sizes of any profile."""
        tensors = {tensor.name: tensor for tensor in self._tensors}
        if info.name in tensors:
            shapes = [profile.shapes(tensors[info.name])[2] for profile in self._profiles]
        else:
            shapes = [self._largest_output(number, info.name) for number in range(len(self._profiles))]
        return max(max(1, int(np.prod(shape, dtype=np.int64))) for shape in shapes)

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
    return TensorInfo(name, np.dtype(trt.nptype(engine.get_tensor_dtype(name))).name, shape)
