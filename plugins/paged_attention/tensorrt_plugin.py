"""Paged attention as quickly deployable plug-ins of TensorRT, their kernels compiled ahead of time (`tensorrt.plugin`).

A plug-in of this kind is one kernel, so an operator of `schema.py` becomes the layers that `LAYERS` describes: one that
writes keys and values into the caches, one that attends from sequences with few new tokens and one from those with
many, into the same output. The plan holds the kernels' PTX: who runs it needs neither
this module nor a plug-in library. Caches are inputs and outputs of one address.

TensorRT asks for sizes and types of outputs, and for grid, threads, shared memory and 32-bit integers as expressions of
the inputs' sizes. All of that is written here once, for numbers and TensorRT's expressions alike, so that a test can
ask the same and launch the kernels itself. tensorrt_kernels.cu has the kernels, in the same order.
"""

import inspect
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import GenericAlias
from typing import Any, Literal, Protocol

from plugins.abi import abi_hash
from plugins.compiling import ROOT, cached_library, content_key, run_all
from plugins.cuda_build import ARCHITECTURES, find_nvcc
from plugins.errors import KilnError
from plugins.paged_attention.schema import CUDA_HEAD_SIZES

NAMESPACE, VERSION = "kiln", "1"
Element = Literal["float16", "bfloat16"]
_CUDA_TYPES: dict[Element, str] = {"float16": "__half", "bfloat16": "__nv_bfloat16"}
SCRATCH = "attention_scratch"
"""Input of a graph: int32, zero at first, `Kernels.scratch` long, that all its layers use in turn."""
DECODE_ROWS = 16
"""Query rows per KV head up to which a sequence takes the kernel for few: the crossover that was measured on an H200
with its chip full (cuda_attention.cu)."""
_WRITE_THREADS, _PREFILL_THREADS, _PREFILL_ROWS, _VECTOR, _WARP = 128, 128, 64, 8, 32
_PLANS = ((8, 4), (8, 3), (8, 2), (4, 3), (4, 2), (2, 2))
"""Warps and stages of the kernel for few rows, fastest first (kPlans of cuda_decode_kernel.cuh)."""
_SHARED_BYTES = {
    **dict.fromkeys(("sm_80", "sm_87"), 163 * 1024),
    **dict.fromkeys(("sm_86", "sm_89", "sm_120"), 99 * 1024),
    **dict.fromkeys(("sm_90", "sm_100"), 227 * 1024),
}
"""That a block may have, by architecture (CUDA C++ Programming Guide, compute capabilities)."""
_STATIC_BYTES = 256
"""Of which the kernel for few rows has so many of its own, at most."""
_SOURCE = "paged_attention/tensorrt_kernels.cu"
_FLAGS = ("-O3", "-std=c++17", "-ptx")

Size = Any
"""An int, or an expression of TensorRT's: what has +, * and //, left operand first."""


class Arithmetic(Protocol):
    """What sizes are combined with beside their operators; the module `tensorrt.plugin` is one."""

    def cdiv(self, first: Size, second: Size) -> Size: ...
    def max(self, first: Size, second: Size) -> Size: ...
    def min(self, first: Size, second: Size) -> Size: ...


class Numbers:
    """`Arithmetic` of ints."""

    def cdiv(self, first: int, second: int) -> int:
        return -(-first // second)

    def max(self, first: int, second: int) -> int:
        return max(first, second)

    def min(self, first: int, second: int) -> int:
        return min(first, second)


@dataclass(frozen=True)
class Kernels:
    """What the kernels are compiled for. Raises KilnError for what they are not built for."""

    element: Element
    head_dim: int
    architecture: str
    group: int
    """Query heads of each KV head."""
    kv_heads: int
    multiprocessors: int
    """Of the GPU, over which the contexts of a step are split."""
    most_seqs: int
    """Sequences of one step."""

    def __post_init__(self) -> None:
        if self.architecture in ARCHITECTURES and self.head_dim in CUDA_HEAD_SIZES and self._plan() is None:
            raise KilnError(
                f"the attention plug-in has no room for {self.most_seqs} sequences in a step on {self.architecture}; "
                "build with fewer: --max-running"
            )
        if self.head_dim not in CUDA_HEAD_SIZES:
            raise KilnError(
                f"the attention plug-in has no kernel for a head size of {self.head_dim}; expected one of "
                f"{', '.join(map(str, CUDA_HEAD_SIZES))}: build the decoder with --attention native"
            )
        if self.architecture not in ARCHITECTURES:
            raise KilnError(
                f"the attention plug-in does not run on {self.architecture}; expected one of "
                f"{', '.join(ARCHITECTURES)}: build the decoder with --attention native"
            )

    def ptx(self) -> str:
        """Compiled once for each content. Raises `NvccMissingError` without nvcc."""
        return cached_library(self._key(), "kernels.ptx", self.compile).read_text(encoding="utf-8")

    def compile(self, target: Path) -> None:
        """Into a file."""
        fresh = target.with_suffix(".new")
        arch = f"-arch=compute_{self.architecture.removeprefix('sm_')}"
        run_all([[*find_nvcc(), *_FLAGS, arch, *self._macros, str(ROOT / _SOURCE), "-o", str(fresh)]], "CUDA compiler")
        fresh.replace(target)

    def _key(self) -> str:
        sources = [path for path in ROOT.rglob("*") if path.suffix in {".h", ".cu", ".cuh"}]
        return content_key((self._macros, self.architecture, find_nvcc()[1:], _FLAGS), ROOT, sources)

    @property
    def _macros(self) -> tuple[str, ...]:
        element, columns = _CUDA_TYPES[self.element], self.columns
        return f"-DKILN_ELEMENT={element}", f"-DKILN_HEAD_DIM={self.head_dim}", f"-DKILN_COLUMNS={columns}"

    @property
    def columns(self) -> int:
        """Tiles of 8 query rows that share a reading of the cache (launch_head of cuda_decode.cu)."""
        return 2 if self.group > 8 and self.head_dim <= 128 else 1

    @property
    def prefill_bytes(self) -> int:
        """PrefillLayout::kBytes."""
        keys = 64 if self.head_dim <= 128 else 16
        return (_PREFILL_ROWS + 4 * keys) * self._row

    @property
    def ranges(self) -> int:
        """Blocks among which the context of a KV head is split."""
        return max(1, self.multiprocessors // self.kv_heads)

    @property
    def counters(self) -> int:
        """Integers of scratch before its floats."""
        return -(-self.multiprocessors // 32) * 32

    @property
    def scratch(self) -> int:
        """Of four bytes each."""
        return self.counters + self.multiprocessors * 2 * self.columns * self._part

    @property
    def plan(self) -> tuple[int, int]:
        """Warps and stages."""
        found = self._plan()
        assert found is not None
        return found

    def decode_bytes(self, plan: tuple[int, int], seqs: Size) -> Size:
        """DecodeLayout::bytes."""
        warps, stages = plan
        merge, join = warps // 2 * self._part * 4, self.ranges * self.columns * 8 * 4
        return seqs * 4 + (warps * stages * 2 * 16 * self._row + max(merge, join) + 4)

    def _plan(self) -> tuple[int, int] | None:
        least = 64 if self.head_dim == 256 else 128
        room = _SHARED_BYTES[self.architecture] - _STATIC_BYTES
        fitting = (plan for plan in _PLANS if plan[0] * _WARP >= least)
        return next((plan for plan in fitting if self.decode_bytes(plan, self.most_seqs) <= room), None)

    @property
    def _row(self) -> int:
        """Bytes of a padded row in shared memory."""
        return self.head_dim * 2 + 16

    @property
    def _part(self) -> int:
        """Floats of one warp's result."""
        return (self.head_dim // 4 + 4) * _WARP


@dataclass(frozen=True)
class Fields:
    """What a layer is made with: the operator's attributes as `schema.ATTRIBUTES` has them, and `plugins.abi.abi_hash`
    of the Kiln that made it. In a graph they are one text, so that no order of fields can be confused.
    """

    num_heads: int
    kv_num_heads: int
    scale: float
    softcap: float
    local_window_size: int
    do_rotary: int
    rotary_interleaved: int
    abi: str

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> "Fields":
        """Raises KilnError where it was made by a Kiln with other operators, naming both."""
        try:
            document = json.loads(text.rstrip("\0"))
            abi = str(document["abi"])
        except (ValueError, KeyError, TypeError) as error:
            raise KilnError(f"found {text[:80]!r} as fields of a plug-in layer; build the engine again") from error
        if abi != abi_hash():
            raise KilnError(
                f"a plug-in layer was made for the plug-in ABI {abi[:12] or 'none'}, this Kiln has {abi_hash()[:12]}; "
                "build the engine again from the model"
            )
        return Fields(**document)


@dataclass(frozen=True)
class Launch:
    """Blocks, threads of each, bytes of dynamic shared memory, and the kernel's integers in order."""

    grid: Size
    threads: int
    shared_bytes: Size
    integers: tuple[Size, ...]


@dataclass(frozen=True)
class Layer:
    """One plug-in. An output that is called as an input has its address; another one the shape of input `like`."""

    name: str
    kernel: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    like: str
    launch: Callable[[Kernels, Fields, Mapping[str, Sequence[Size]], Arithmetic], Launch]


def _write_launch(kernels: Kernels, fields: Fields, shapes: Mapping[str, Sequence[Size]], math: Arithmetic) -> Launch:
    """A warp for each token and 32 vectors of 8 elements."""
    tokens = shapes["key"][0]
    parts = -(-(2 * fields.kv_num_heads * kernels.head_dim // _VECTOR) // _WARP)
    blocks = math.cdiv(tokens * (parts * _WARP), _WRITE_THREADS)
    return Launch(math.max(blocks, 1), _WRITE_THREADS, 0, _shared_integers(fields, tokens, shapes))


def _decode_launch(kernels: Kernels, fields: Fields, shapes: Mapping[str, Sequence[Size]], math: Arithmetic) -> Launch:
    """As many blocks as the GPU has multiprocessors, whatever the sizes."""
    warps, stages = kernels.plan
    integers = (*_attending_integers(kernels, fields, shapes), warps, stages, kernels.counters)
    shared = kernels.decode_bytes(kernels.plan, shapes["past_seqlens"][0])
    return Launch(kernels.ranges * fields.kv_num_heads, warps * _WARP, shared, integers)


def _prefill_launch(kernels: Kernels, fields: Fields, shapes: Mapping[str, Sequence[Size]], math: Arithmetic) -> Launch:
    """At least as many tiles as a call can have whatever its lengths (`most_tiles` of cuda_launch.h), per KV head."""
    rows = shapes["query"][0] * (fields.num_heads // fields.kv_num_heads)
    tiles = rows // _PREFILL_ROWS + math.min(rows // (DECODE_ROWS + 1), shapes["past_seqlens"][0])
    grid = math.max(tiles, 1) * fields.kv_num_heads
    return Launch(grid, _PREFILL_THREADS, kernels.prefill_bytes, _attending_integers(kernels, fields, shapes))


def _attending_integers(kernels: Kernels, fields: Fields, shapes: Mapping[str, Sequence[Size]]) -> tuple[Size, ...]:
    return (
        *_shared_integers(fields, shapes["query"][0], shapes),
        *(fields.num_heads, max(fields.local_window_size, 0), DECODE_ROWS),
        *(bits_of(fields.scale or kernels.head_dim**-0.5), bits_of(fields.softcap)),
    )


def _shared_integers(fields: Fields, tokens: Size, shapes: Mapping[str, Sequence[Size]]) -> tuple[Size, ...]:
    blocks, block_size = shapes["key_cache"][:2]
    positions, half = shapes["cos_cache"][:2]
    return (
        *(tokens, shapes["past_seqlens"][0], blocks, block_size, shapes["block_table"][1], fields.kv_num_heads),
        *(positions, half * fields.do_rotary, fields.rotary_interleaved),
    )


_SEQUENCES = ("cumulative_sequence_length", "past_seqlens", "block_table")
_TABLES = ("cos_cache", "sin_cache")
_ATTENDING = ("query", "key_cache", "value_cache", *_SEQUENCES, *_TABLES)
LAYERS = (
    Layer(
        "PagedAttentionWrite",
        "kiln_paged_write",
        ("key", "value", "key_cache", "value_cache", *_SEQUENCES, "slot_mapping", *_TABLES),
        ("key_cache", "value_cache"),
        "key_cache",
        _write_launch,
    ),
    Layer(
        "PagedAttentionDecode",
        "kiln_paged_decode",
        (*_ATTENDING, SCRATCH),
        ("output", SCRATCH),
        "query",
        _decode_launch,
    ),
    Layer(
        "PagedAttentionPrefill", "kiln_paged_prefill", (*_ATTENDING, "output"), ("output",), "query", _prefill_launch
    ),
)


def bits_of(number: float) -> int:
    """A float32's bits as the 32-bit integer that TensorRT can pass."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def register(plugin: Any, kernels: Kernels, layers: Sequence[Layer] = LAYERS) -> None:
    """Register the layers with the module `tensorrt.plugin`, once in a process, for networks of this type and size."""
    for layer in layers:
        name = f"{NAMESPACE}::{layer.name}"
        plugin.register(name)(_description(plugin, layer))
        plugin.aot_impl(name)(_implementation(plugin, layer, kernels))


def _description(plugin: Any, layer: Layer) -> Callable[..., Any]:
    """Names TensorRT the outputs of a layer."""

    def describe(*descriptions: Any, fields: str) -> Any:
        Fields.from_text(fields)
        inputs = dict(zip(layer.inputs, descriptions, strict=True))
        return tuple(inputs[name].aliased() if name in inputs else inputs[layer.like].like() for name in layer.outputs)

    returned = GenericAlias(tuple, (plugin.TensorDesc,) * len(layer.outputs))
    return _with_signature(describe, plugin, layer, {"fields": str}, returned)


def _implementation(plugin: Any, layer: Layer, kernels: Kernels) -> Callable[..., Any]:
    """Hands TensorRT the kernel of a layer, and how it is launched."""

    def implement(*arguments: Any) -> Any:
        *descriptions, text, _, _ = arguments
        shapes = {
            name: list(description.shape_expr) for name, description in zip(layer.inputs, descriptions, strict=True)
        }
        launch = layer.launch(kernels, Fields.from_text(text), shapes, plugin)
        parameters = plugin.KernelLaunchParams()
        parameters.grid_x, parameters.block_x, parameters.shared_mem = launch.grid, launch.threads, launch.shared_bytes
        integers = plugin.SymIntExprs(len(launch.integers))
        for index, integer in enumerate(launch.integers):
            integers[index] = plugin.SymInt32(integer)
        return layer.kernel, kernels.ptx(), parameters, integers

    rest = {"fields": str, "outputs": GenericAlias(tuple, (plugin.TensorDesc,)), "tactic": int}
    returned = GenericAlias(tuple, (str, str, plugin.KernelLaunchParams, plugin.SymIntExprs))
    return _with_signature(implement, plugin, layer, rest, returned)


def _with_signature(
    function: Callable[..., Any], plugin: Any, layer: Layer, rest: Mapping[str, Any], returned: Any
) -> Callable[..., Any]:
    """TensorRT reads names and types from a function's signature; ours has the layer's."""
    kinds = {**dict.fromkeys(layer.inputs, plugin.TensorDesc), **rest}
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
        for name, kind in kinds.items()
    ]
    function.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
    return function
