"""ONNX Runtime: serving graphs over a paged cache (`OnnxRuntimeDecoder`) and plain models (`OnnxRuntimeModel`).

The cache is bound once, each buffer as an input and as the output that aliases it, so that the attention
operator updates it in place and a step moves only its own inputs and logits. Knows nothing of requests.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.backends.base import StepInputs
from engines.backends.checking import check_inputs
from engines.backends.memory import check_pool, shortage, shortage_in
from engines.backends.probes import PREFIX, graph_with_probes
from engines.backends.window import graph_with_window
from engines.runtime.info import TensorInfo
from plugins.errors import KilnError
from plugins.paged_attention.schema import CACHE_ITEMSIZE, LOGITS, STEP_INPUTS, CacheDtype, KvSpec
from plugins.sampling.schema import GRAPH_INPUTS, TOKENS

CPU = "CPUExecutionProvider"

ALTERNATING = {"session.force_spinning_stop": "1"}
"""Session configuration for sessions that take turns: their threads rest between runs instead of holding the cores."""
_SLOWER_ON_CPU = ["SkipLayerNormFusion", "BiasGeluFusion"]
"""ONNX Runtime's own rewrites that cost time on its CPU provider: its kernel for residual and norm together takes twice
(RMSNorm) to six times (LayerNorm) as long as the two apart, docs/passes.md; that for bias and GELU 1.1 times."""
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_ALIGNMENT = 64
"""Cache line, and one AVX-512 register."""
ONNX_TYPE = {"float32": 1, "int8": 3, "int32": 6, "int64": 7, "float16": 10, "bfloat16": 16}
"""Numbers of onnx.TensorProto by NumPy's names."""
_NUMPY_TYPE = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(int8)": "int8",
    "tensor(int16)": "int16",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(uint8)": "uint8",
    "tensor(uint16)": "uint16",
    "tensor(uint32)": "uint32",
    "tensor(uint64)": "uint64",
    "tensor(bool)": "bool",
}


class OnnxRuntimeDecoder:
    """A serving graph with its cache. Implements `DecoderBackend`.

    Args:
        engine: the .onnx file; inputs and outputs are named as in `plugins.paged_attention.schema`.
        kv: cache layout; memory of `num_blocks * kv.bytes_per_block` bytes is reserved, zeroed, once.
        host_blocks: blocks to which `move_blocks` can move content out of the cache.
        window: attend to so many tokens only, for a cache of rings; None attends as the graph says.
        probes: tensors inside the graph that `probe` gives; they cost memory and speed.
        provider: only the CPU provider for now.
        plugins: libraries with the graph's custom operators.
        threads: threads of one step; None uses every CPU that this process may run on.
        optimized: False runs the graph as it is, without ONNX Runtime's own rewrites, to judge a graph by itself.
        config: session configuration entries of ONNX Runtime.
        profile: where ONNX Runtime's own profile of the session goes, see `end_profile`; it costs some speed.

    Raises KilnError when the graph cannot be loaded, does not follow the schema, or memory is short.
    """

    _samples = False  # whether the graph chooses tokens, which takes more inputs

    def __init__(
        self,
        engine: Path,
        kv: KvSpec,
        num_blocks: int,
        *,
        host_blocks: int = 0,
        window: int | None = None,
        probes: Sequence[str] = (),
        provider: str = CPU,
        plugins: Sequence[Path] = (),
        threads: int | None = None,
        optimized: bool = True,
        config: Mapping[str, str] | None = None,
        profile: Path | None = None,
    ) -> None:
        if provider != CPU:
            raise KilnError(f"the paged cache runs on {CPU} for now, found provider {provider}; build for --sku cpu")
        check_pool(kv, num_blocks + host_blocks)
        self.kv = kv
        self.num_blocks = num_blocks
        self.host_blocks = host_blocks
        assert window is None or not probes, "a graph is changed in one way"
        graph = None if window is None else graph_with_window(engine, window)
        if probes:
            graph = graph_with_probes(engine, probes)
        self._session = session_from_file(engine, provider, plugins, threads, optimized, config, graph, profile)
        check_serving_graph(engine, self._session, kv, probes, samples=self._samples)
        outputs = {node.name: node for node in self._session.get_outputs()}
        self._vocabulary: int = outputs[LOGITS].shape[1]
        self._binding = self._session.io_binding()
        self._arrays: dict[str, NDArray] = {}  # over the caches' memory; 16-bit floats as uint16
        self._caches = self._bind_caches()
        self._probes = tuple(probes)
        self._host_caches = {
            name: np.zeros((host_blocks, *array.shape[1:]), array.dtype)
            for name, array in self._arrays.items()
            if host_blocks
        }

    @property
    def vocab_size(self) -> int:
        return self._vocabulary

    @property
    def cache_addresses(self) -> dict[str, int]:
        """Address of every cache buffer by graph input name; it never changes."""
        return {name: value.data_ptr() for name, value in self._caches.items()}

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Run one step and update the caches in place. Returns logits [rows, vocabulary], owned by the caller.

        Raises KilnError when memory is short and else ONNX Runtime's own error; the sequences in it must then be given
        up.
        """
        if self._session is None:
            raise RuntimeError("the backend is closed")
        return self._run(inputs)

    def _run(self, inputs: StepInputs) -> NDArray[np.float32]:
        for field in fields(inputs):
            self._binding.bind_cpu_input(field.name, getattr(inputs, field.name))
        for probe in self._probes:
            self._binding.bind_output(PREFIX + probe)  # anew: its shape changes with the step
        logits = np.empty((len(inputs.logits_indices), self._vocabulary), np.float32)
        self._binding.bind_output(LOGITS, "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            if shortage_in(error) is None:
                raise
            raise KilnError(f"a step of {len(inputs.input_ids)} tokens failed: {ort_message(error)}") from error
        return logits

    def probe(self, inputs: StepInputs) -> dict[str, NDArray[np.float32]]:
        """Run one step as `step` does; gives what the `probes` held, by name, and the logits."""
        logits = self.step(inputs)
        first = len(self._caches)  # outputs come in the order in which they were bound
        values = self._binding.get_outputs()[first : first + len(self._probes)]
        return {**{name: value.numpy() for name, value in zip(self._probes, values, strict=True)}, LOGITS: logits}

    def end_profile(self) -> Path:
        """The JSON file of a session made with `profile`; nothing more is written to it."""
        return Path(self._session.end_profiling())

    def move_blocks(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (from, to) one after the other; numbers from `num_blocks` on are the host blocks."""
        for name, cache in self._arrays.items():
            host = self._host_caches.get(name)
            for source, target in moves:
                self._block(cache, host, target)[...] = self._block(cache, host, source)

    def close(self) -> None:
        """Free session and caches. The backend is unusable afterwards; a second call does nothing."""
        self._binding = None
        self._caches = {}
        self._arrays = {}
        self._host_caches = {}
        self._session = None

    def _block(self, cache: NDArray, host: NDArray | None, number: int) -> NDArray:
        if number < self.num_blocks:
            return cache[number]
        assert host is not None, f"block {number} is a host block, and there are none"
        return host[number - self.num_blocks]

    def _bind_caches(self) -> dict[str, Any]:
        """Allocate every cache and bind it as input and as output."""
        caches = {}
        for layer in range(len(self.kv.layers)):
            for tensor in self.kv.tensors(layer):
                shape = self.kv.tensor_shape(tensor, self.num_blocks)
                try:
                    self._arrays[tensor.name], value = _zeroed(shape, tensor.dtype)
                    caches[tensor.name] = value
                except MemoryError as error:
                    size = self.num_blocks * self.kv.bytes_per_block / 2**30
                    asked = self.num_blocks * self.kv.block_size * tensor.bytes_per_token
                    raise KilnError(
                        f"the system refuses {size:.2f} GiB for {self.num_blocks} cache blocks, at {tensor.name}: "
                        f"{shortage(asked)}; lower kv_blocks"
                    ) from error
                self._binding.bind_ortvalue_input(tensor.name, value)
                self._binding.bind_ortvalue_output(tensor.output_name, value)
        return caches


class OnnxRuntimeModel:
    """A model without a KV cache. Implements `InferBackend`; `infer` may be called from several threads.

    Arguments and errors as for `OnnxRuntimeDecoder`; any provider that the installed ONNX Runtime has, with its
    `options`.
    """

    def __init__(
        self,
        engine: Path,
        *,
        provider: str = CPU,
        plugins: Sequence[Path] = (),
        threads: int | None = None,
        optimized: bool = True,
        config: Mapping[str, str] | None = None,
        profile: Path | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        session = session_from_file(
            engine, provider, plugins, threads, optimized, config, profile=profile, provider_options=options
        )
        self._use(session, engine)

    def _use(self, session: Any, engine: Path) -> None:
        self._session = session
        for node in self._session.get_inputs():
            if node.type not in _NUMPY_TYPE:
                raise KilnError(f"{engine}: input {node.name} is a {node.type}, which infer cannot feed")
        self.inputs = _tensors(self._session.get_inputs())
        self.outputs = _tensors(self._session.get_outputs())
        self._output_names = [tensor.name for tensor in self.outputs]

    def infer(self, inputs: Mapping[str, NDArray]) -> dict[str, NDArray]:
        """Run once; gives every graph output under its own name.

        Raises KilnError naming a missing, unknown, mis-shaped or mis-typed input. Types are not converted.
        """
        session = self._session
        if session is None:
            raise RuntimeError("the backend is closed")
        self.check(inputs)
        try:
            results = session.run(self._output_names, dict(inputs))
        except Exception as error:  # ONNX Runtime's errors have no common base
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
            raise KilnError(f"the model failed on inputs of shape {shapes}: {ort_message(error)}") from error
        return dict(zip(self._output_names, results, strict=True))

    @property
    def profile_start(self) -> int:
        """When a profile's clock began, in nanoseconds of `time.time_ns`."""
        return int(self._session.get_profiling_start_time_ns())

    def end_profile(self) -> Path:
        """The JSON file of a session made with `profile`; nothing more is written to it."""
        return Path(self._session.end_profiling())

    def close(self) -> None:
        """Free the session. The backend is unusable afterwards; a second call does nothing."""
        self._session = None

    def check(self, inputs: Mapping[str, NDArray]) -> None:
        """Raise KilnError naming a missing, unknown, mis-shaped or mis-typed input. Types are not converted."""
        check_inputs(self.inputs, inputs)


def _tensors(nodes: Sequence[Any]) -> tuple[TensorInfo, ...]:
    """Inputs or outputs of a session; a type that NumPy has no name for, such as a sequence, keeps ONNX's."""
    return tuple(TensorInfo(node.name, _NUMPY_TYPE.get(node.type, node.type), tuple(node.shape)) for node in nodes)


def session_from_file(
    engine: Path,
    provider: str,
    plugins: Sequence[Path],
    threads: int | None,
    optimized: bool = True,
    config: Mapping[str, str] | None = None,
    graph: bytes | None = None,
    profile: Path | None = None,
    provider_options: Mapping[str, str] | None = None,
) -> Any:
    """An ONNX Runtime session of a file, or of `graph`, which replaces it but uses the weights beside it.

    Raises KilnError naming the missing file, library, provider or operator.
    """
    if threads is not None and threads < 1:
        raise KilnError(f"threads is {threads}; expected at least 1, or None for every CPU")
    for path in (engine, *plugins):
        if not path.is_file():
            raise KilnError(f"{path} does not exist; expected a file: check the path, or rebuild the bundle")
    try:
        import onnxruntime
    except ImportError as error:
        raise KilnError(
            f"cannot import onnxruntime ({error}); install it: pip install 'kiln-engine[cpu]', or [gpu] for CUDA"
        ) from error
    available = onnxruntime.get_available_providers()
    if provider not in available:
        raise KilnError(
            f"the installed onnxruntime has no {provider}, only {', '.join(available)}; "
            "install onnxruntime-gpu, or build for --sku cpu"
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or len(os.sched_getaffinity(0))
    # Plans are kept per combination of input shapes, and a packed step rarely repeats one: they would pile up.
    options.enable_mem_pattern = False
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    for key, value in (config or {}).items():
        options.add_session_config_entry(key, value)
    options.log_severity_level = 4  # errors arrive as exceptions; do not print them as well
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    if graph is not None:
        options.add_session_config_entry(_WEIGHTS_FOLDER, str(engine.parent))
    for plugin in plugins:
        try:
            options.register_custom_ops_library(str(plugin))
        except Exception as error:
            raise KilnError(
                f"cannot load the operator library {plugin}: {ort_message(error)}; install the ONNX Runtime that it "
                "needs, or rebuild the bundle on this machine"
            ) from error
    try:
        return onnxruntime.InferenceSession(
            str(engine) if graph is None else graph,
            options,
            providers=[(provider, dict(provider_options or {})), *([] if provider == CPU else [CPU])],
            disabled_optimizers=_SLOWER_ON_CPU if provider == CPU else None,
        )
    except Exception as error:
        raise KilnError(
            f"ONNX Runtime {onnxruntime.__version__} cannot load {engine}: {ort_message(error)}; "
            "rebuild the bundle, or pass the libraries of its custom operators"
        ) from error


def ort_message(error: Exception) -> str:
    """ONNX Runtime's message in one line, without its code and source position; of short memory with what there is."""
    text = " ".join(str(error).split())
    text = text.split(" : ", 3)[-1] if text.startswith("[ONNXRuntimeError]") else text
    return text if (short := shortage_in(error)) is None else f"{text} ({short})"


def check_serving_graph(
    engine: Path, session: Any, kv: KvSpec, probes: Sequence[str], *, samples: bool = False
) -> None:
    """Compare the graph's inputs and outputs with the schema and the cache layout; it `samples` if it is to."""
    inputs = {node.name: node for node in session.get_inputs()}
    outputs = {node.name: node for node in session.get_outputs()}
    caches = {tensor.name: tensor for layer in range(len(kv.layers)) for tensor in kv.tensors(layer)}
    aliases = {tensor.output_name for tensor in caches.values()}
    for kind, found, expected in (
        ("inputs", set(inputs), {*STEP_INPUTS, *caches, *(GRAPH_INPUTS if samples else ())}),
        ("outputs", set(outputs), {LOGITS, *aliases, *(PREFIX + p for p in probes), *((TOKENS,) if samples else ())}),
    ):
        if found != expected:
            lacks, has = sorted(expected - found)[:3], sorted(found - expected)[:3]
            raise KilnError(
                f"{engine} is not a serving graph for a cache of {len(kv.layers)} layers: among its {kind} it lacks "
                f"{', '.join(lacks) or 'nothing'} and has {', '.join(has) or 'nothing'} besides; rebuild it"
            )
    for name, cache in caches.items():
        shape = (None, *kv.tensor_shape(cache, 1)[1:])
        found_shape = inputs[name].shape
        dtype = {"tensor(float)": "float32"}.get(inputs[name].type, inputs[name].type.removeprefix("tensor(")[:-1])
        fits = len(found_shape) == len(shape) and all(
            not isinstance(have, int) or want in (None, have) for want, have in zip(shape, found_shape, strict=True)
        )
        if dtype != cache.dtype or not fits:
            wanted = f"{cache.dtype} [blocks, {', '.join(map(str, shape[1:]))}]"
            raise KilnError(f"{engine}: {name} is {dtype} {found_shape}; the cache layout says {wanted}: rebuild it")
    logits = outputs[LOGITS]
    if len(logits.shape) != 2 or not isinstance(logits.shape[1], int) or logits.type != "tensor(float)":
        raise KilnError(
            f"{engine}: {LOGITS} is {logits.type} {logits.shape}; expected float32 [rows, vocabulary] with the "
            "vocabulary as a number: rebuild it"
        )


def _zeroed(shape: tuple[int, ...], dtype: CacheDtype) -> tuple[NDArray, Any]:
    """A zeroed, aligned array (16-bit floats as uint16) and the OrtValue over it.

    The system commits its pages when they are first written.
    """
    import onnxruntime

    itemsize = CACHE_ITEMSIZE[dtype]
    size = int(np.prod(shape)) * itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    array = raw[start : start + size].view({4: np.float32, 2: np.uint16, 1: np.int8}[itemsize]).reshape(shape)
    return array, onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, ONNX_TYPE[dtype])
