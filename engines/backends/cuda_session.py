"""A serving graph in ONNX Runtime on a device: one stream, caches at fixed addresses, inputs and outputs by address.

Nothing here waits for the device: a run queues its kernels and returns. Knows no steps, ladders or requests.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.backends.cuda_memory import DeviceMemory, Runtime
from engines.backends.cuda_staging import Layout
from engines.backends.memory import shortage_in
from engines.backends.onnxruntime import CPU, ONNX_TYPE, check_serving_graph, ort_message, session_from_file
from engines.backends.window import graph_with_window
from plugins.errors import KilnError
from plugins.paged_attention.schema import LOGITS, CacheTensor, KvSpec
from plugins.sampling.schema import PREVIOUS_TOKENS, TOKENS

_CONFIG = {"session.use_device_allocator_for_initializers": "1"}
"""Weights are allocated at their own size, not from an arena that doubles."""
MOST_ROWS = 1 << 16
"""Rows of logits of one step that tokens are chosen from."""
_NO_WAITING = "disable_synchronize_execution_providers"
_HOST_MEMORY = "Cpu"
"""What ONNX Runtime calls it."""


class CudaSession:
    """A session, and its caches once `allocate_caches` was called. Arguments as for `CudaDecoder`.

    `samples`: whether the graph is to choose tokens (`passes.bind_sampling`). `profile`: where ONNX Runtime's own
    profile of the session goes, see `end_profile`.

    Raises KilnError when the graph cannot be loaded or does not follow the schema.
    """

    def __init__(
        self,
        engine: Path,
        kv: KvSpec,
        runtime: Runtime,
        plugins: Sequence[Path],
        window: int | None,
        options: Mapping[str, str],
        samples: bool = False,
        profile: Path | None = None,
    ) -> None:
        import onnxruntime

        self._engine, self._kv, self._runtime = engine, kv, runtime
        graph = None if window is None else graph_with_window(engine, window)
        own = {} if runtime.provider == CPU else _stream_options(runtime)
        self._session = session_from_file(
            engine,
            runtime.provider,
            plugins,
            1,
            config=_CONFIG,
            graph=graph,
            profile=profile,
            provider_options={**options, **own},
        )
        check_serving_graph(engine, self._session, kv, (), samples=samples)
        self.vocabulary: int = next(node for node in self._session.get_outputs() if node.name == LOGITS).shape[1]
        places = zip(self._session.get_inputs(), self._session.get_input_memory_infos(), strict=True)
        on_host = {tensor.name for tensor, memory in places if memory.name == _HOST_MEMORY}
        self._host_inputs = set() if runtime.provider == CPU else on_host
        self._run_options = onnxruntime.RunOptions()
        self._run_options.add_run_config_entry(_NO_WAITING, "1")
        self._caches: dict[str, DeviceMemory] = {}
        self._num_blocks = 0

    @property
    def tensors(self) -> tuple[CacheTensor, ...]:
        """All layers' cache tensors."""
        return tuple(tensor for layer in range(len(self._kv.layers)) for tensor in self._kv.tensors(layer))

    @property
    def cache_addresses(self) -> dict[str, int]:
        """Address of every cache buffer by graph input name; it never changes."""
        return {name: memory.address for name, memory in self._caches.items()}

    def block_bytes(self, tensor: CacheTensor) -> int:
        """Bytes of one block in one cache tensor."""
        return self._kv.block_size * tensor.bytes_per_token

    def allocate_caches(self, num_blocks: int) -> None:
        """Reserve and zero the caches. Raises KilnError when the device has too little memory; nothing is kept then."""
        self._num_blocks = num_blocks
        try:
            for tensor in self.tensors:
                size = num_blocks * self.block_bytes(tensor)
                what = f"{tensor.name}, one of {len(self.tensors)} parts of a cache of {num_blocks} blocks,"
                self._caches[tensor.name] = memory = DeviceMemory(self._runtime, size, what)
                self._runtime.clear(memory.address, size)
        except KilnError as error:
            self._free_caches()
            raise KilnError(
                f"{error}; the cache takes {num_blocks * self._kv.bytes_per_block / 2**30:.2f} GiB in all: lower "
                "kv_blocks"
            ) from error

    def binding(self) -> Any:
        """A new binding of all caches, each as an input and as the output that aliases it."""
        binding = self._session.io_binding()
        for tensor in self.tensors:
            shape = self._kv.tensor_shape(tensor, self._num_blocks)
            place = (self._runtime.device_type, self._runtime.device, ONNX_TYPE[tensor.dtype], shape)
            address = self._caches[tensor.name].address
            binding.bind_input(tensor.name, *place, address)
            binding.bind_output(tensor.output_name, *place, address)
        return binding

    def bind_inputs(self, binding: Any, layout: Layout, address: int, host_address: int) -> None:
        """Let a binding read the arrays of a layout, which begins at a device address and at one of the host.

        Those that the graph does not read on the device, `position_ids` of a graph that rotates by lengths for one, are
        bound where they are on the host: ONNX Runtime would copy them there first, and wait for the step before.
        """
        for name, array in layout.arrays.items():
            offset = layout.offsets[name]
            if name in self._host_inputs:
                binding.bind_input(name, "cpu", 0, ONNX_TYPE[array.dtype], array.shape, host_address + offset)
            else:
                self._bind(binding.bind_input, name, array.dtype, array.shape, address + offset)

    def bind_logits(self, binding: Any, rows: int, address: int) -> None:
        """Let a binding write its logits, float32 [rows, vocabulary], to a device address."""
        self._bind(binding.bind_output, LOGITS, "float32", (rows, self.vocabulary), address)

    def bind_tokens(self, binding: Any, rows: int, address: int) -> None:
        """Let a binding read `MOST_ROWS` tokens of the step before from a device address, and write its own there.

        The graph reads them first of all and writes last of all, so that one place will do for both.
        """
        self._bind(binding.bind_input, PREVIOUS_TOKENS, "int32", (MOST_ROWS,), address)
        self._bind(binding.bind_output, TOKENS, "int32", (rows,), address)

    def run(self, binding: Any) -> None:
        """Queue one step. Raises KilnError; the step's sequences must then be given up."""
        try:
            self._session.run_with_iobinding(binding, self._run_options)
        except Exception as error:  # ONNX Runtime's errors have no common base
            free, total = self._runtime.memory()
            short = (
                f" ({free / 2**30:.2f} GiB free of {total / 2**30:.2f} GiB on {self._runtime.name}; lower kv_blocks)"
            )
            text = ort_message(error) if shortage_in(error) is None else " ".join(str(error).split()) + short
            raise KilnError(f"the step failed: {text}") from error

    @property
    def profile_start(self) -> int:
        """When a profile's clock began, in nanoseconds of `time.time_ns`."""
        return int(self._session.get_profiling_start_time_ns())

    def end_profile(self) -> Path:
        """The JSON file of a session made with `profile`; nothing more is written to it."""
        return Path(self._session.end_profiling())

    def close(self) -> None:
        """Free session and caches, after all bindings of it are gone. A second call does nothing."""
        self._session = None
        self._free_caches()

    def _free_caches(self) -> None:
        for memory in self._caches.values():
            memory.close()
        self._caches = {}

    def _bind(self, bind: Any, name: str, dtype: str, shape: tuple[int, ...], address: int) -> None:
        bind(name, self._runtime.device_type, self._runtime.device, ONNX_TYPE[dtype], shape, address)


def _stream_options(runtime: Runtime) -> dict[str, str]:
    return {
        "device_id": str(runtime.device),
        "user_compute_stream": str(runtime.address),
        "arena_extend_strategy": "kSameAsRequested",
    }
