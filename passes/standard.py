"""The passes that Kiln has, in the order in which they run, and which of them a target gets by default.

One visible table. The order matters: what a pass looks for is what those before it leave.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from passes.attention_precision import AttentionPrecision
from passes.base import Pass
from passes.bind_attention import BindAttention
from passes.bind_half_norm import BindHalfNorm
from passes.bind_linear import BindLinear
from passes.bind_sampling import BindSampling
from passes.cast_attention import CastAttention
from passes.cast_precision import CastPrecision
from passes.fold_batch_norm import FoldBatchNorm
from passes.fold_constants import FoldConstants
from passes.fuse_attention import FuseAttention
from passes.fuse_cpu_norm import BindAddRmsNorm
from passes.fuse_cpu_swiglu import BindSwiglu
from passes.fuse_gelu import FuseGelu
from passes.fuse_layer_norm import FuseLayerNorm
from passes.fuse_qdq import FuseQdq
from passes.fuse_rms_norm import FuseRmsNorm
from passes.fuse_rope import FuseRope
from passes.fuse_skip_norm import FuseSkipNorm
from passes.fuse_swiglu import FuseSwiglu
from passes.hoist_tables import HoistTables
from passes.io_layout import IoLayoutNhwc
from passes.layout_nhwc import LayoutNhwc
from passes.merge_duplicates import MergeDuplicates
from passes.onnx_model import DecoderSpec
from passes.pack_matmuls import PackMatMuls
from passes.prune import PruneStructure
from passes.quantize_cache import QuantizeCache
from passes.quantize_linear import QuantizeLinear
from passes.remove_no_ops import RemoveNoOps
from passes.remove_unused import RemoveUnused
from passes.reparameterize import Reparameterize
from passes.select_rows import SelectRows
from passes.sink_transposes import SinkTransposes
from plugins.errors import KilnError, first_line

Backend = Literal["cpu", "cuda", "tensorrt"]
Precision = Literal["fp32", "fp16", "bf16"]
IoLayout = Literal["nchw", "nhwc"]
_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class PassTarget:
    """What decides which passes run and with which options."""

    backend: Backend = "cpu"
    decoder: DecoderSpec | None = None
    precision: Precision = "fp32"
    io_layout: IoLayout = "nchw"
    linear_rows: int = 0
    """Up to how many rows products take Kiln's own CUDA kernels (`passes.bind_linear`)."""
    measure_ranges: Callable[[Path], Mapping[str, float]] | None = None
    """Largest magnitudes by tensor name of a model, for casting to 16 bits; None where it cannot be run."""


@dataclass(frozen=True)
class PassSwitches:
    """A user's choice. `only` replaces the default set; `enable` and `disable` change it.

    `options` gives constructor arguments by pass name, over the target's own.
    """

    only: tuple[str, ...] = ()
    enable: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """One row of the table."""

    make: Callable[..., Pass]
    default: Callable[[PassTarget], bool] = lambda target: True
    options: Callable[[PassTarget], dict[str, Any]] = lambda target: {}
    """Constructor arguments that the target decides."""

    @property
    def name(self) -> str:
        return str(self.make.name)  # type: ignore[attr-defined]


def _never(target: PassTarget) -> bool:
    return False


def _on_ort(target: PassTarget) -> bool:
    return target.backend != "tensorrt"


def _with_plugins(target: PassTarget) -> bool:
    """Whether the engine carries Kiln's own operators: those of decoders do, for attention."""
    return target.backend == "cpu" and target.decoder is not None


def _on_cuda(target: PassTarget) -> bool:
    """Whether the engine carries Kiln's CUDA attention, which is in 16 bits even where the rest is not."""
    return target.backend == "cuda" and target.decoder is not None


def _half_on_cuda(target: PassTarget) -> bool:
    """Whether the engine carries all of Kiln's CUDA operators: those of 16-bit decoders do."""
    return _on_cuda(target) and target.precision != "fp32"


def _half_type(target: PassTarget) -> dict[str, Any]:
    return {"dtype": _DTYPES.get(target.precision, "float16")}


def _norm_target(target: PassTarget) -> dict[str, Any]:
    return {"target": "standard" if target.backend == "tensorrt" else "contrib"}


def _rope_target(target: PassTarget) -> dict[str, Any]:
    if target.decoder is not None:
        return {"target": "paged_attention"}
    return {"target": "standard" if target.backend == "tensorrt" else "rotary_embedding"}


_LAYOUTS: Mapping[Backend, str] = {"cpu": "cpu-int8", "cuda": "cuda", "tensorrt": "tensorrt"}


def _attention_target(target: PassTarget) -> dict[str, Any]:
    return {"target": "standard" if target.backend == "tensorrt" else "onnxruntime"}


def _cast_decoder(target: PassTarget) -> dict[str, Any]:
    """The decoder as `cast_attention` leaves it."""
    if target.decoder is None or not _on_cuda(target):
        return {"decoder": target.decoder}
    kv = replace(target.decoder.kv, dtype=_half_type(target)["dtype"], value_dtype=None)
    return {"decoder": replace(target.decoder, kv=kv)}


_REWRITES: tuple[Entry, ...] = (
    Entry(BindAttention, default=lambda target: target.backend == "cpu" or _on_cuda(target)),
    Entry(FoldConstants),
    Entry(RemoveNoOps),
    Entry(FoldBatchNorm),
    Entry(Reparameterize),
    Entry(IoLayoutNhwc, default=lambda target: target.io_layout == "nhwc"),
    Entry(
        HoistTables,
        options=lambda target: {"max_positions": target.decoder.max_context if target.decoder else None},
    ),
    Entry(MergeDuplicates),
    Entry(FuseLayerNorm, options=_norm_target),
    Entry(FuseRmsNorm, options=_norm_target),
    Entry(FuseRope, options=_rope_target),
    Entry(FuseAttention, options=_attention_target),
    Entry(FuseGelu, options=_norm_target),
    Entry(FuseSwiglu, default=_on_ort),
    Entry(SelectRows),  # after the fusions, whose patterns it would cut through
    Entry(
        PackMatMuls,
        options=lambda target: {"packed_attention": target.decoder is not None, "split": target.backend == "cuda"},
        # TensorRT merges products itself; packed ones before a Split it takes apart and multiplies in float
    ),
    Entry(FuseSkipNorm, default=lambda target: target.backend == "cuda" and not _half_on_cuda(target)),
    Entry(PruneStructure, default=_never),
)
_CAST = Entry(
    CastPrecision,
    default=lambda target: target.precision != "fp32",
    options=lambda target: {**_half_type(target), "measure": target.measure_ranges},
)
_CPU_OPERATORS = (Entry(BindAddRmsNorm, default=_with_plugins), Entry(BindSwiglu, default=_with_plugins))
FLOAT_TABLE = (*_REWRITES, _CAST, *_CPU_OPERATORS)
"""What a graph is rewritten to before it is calibrated and quantised."""

BINDING_TABLE: tuple[Entry, ...] = (
    Entry(
        CastAttention,
        default=_on_cuda,
        options=lambda target: {"decoder": target.decoder, **_half_type(target)},
    ),
    Entry(BindHalfNorm, default=_half_on_cuda, options=_half_type),
    Entry(BindLinear, default=_half_on_cuda, options=lambda target: {"rows": target.linear_rows}),
    Entry(QuantizeLinear, default=_never),
    Entry(AttentionPrecision, default=_never),
    Entry(QuantizeCache, default=_never, options=_cast_decoder),
    Entry(FuseQdq, default=lambda target: target.backend == "cpu"),
    Entry(LayoutNhwc, options=lambda target: {"target": _LAYOUTS[target.backend]}),
    Entry(SinkTransposes),
    Entry(FoldConstants),  # once more: what the passes above left
    Entry(FoldBatchNorm),
    Entry(Reparameterize),
    Entry(RemoveUnused),
    Entry(RemoveNoOps),
    Entry(MergeDuplicates),
    Entry(BindSampling, default=_on_cuda),
)
"""What turns the result into a backend's own forms."""

WIDE_TABLE = (*_REWRITES, *_CPU_OPERATORS)
NARROWING_TABLE = (_CAST, *BINDING_TABLE)
"""The same two parts, cut before the cast to 16 bits: what is calibrated for Kiln's CUDA operators is in FP32, which
this machine's CPU runs, and is quantised once the operators are there."""

TABLE = (*FLOAT_TABLE, *BINDING_TABLE)


def pass_names() -> tuple[str, ...]:
    """All passes, in order; one that runs twice is named once."""
    return tuple(dict.fromkeys(entry.name for entry in TABLE))


def standard_passes(
    target: PassTarget, switches: PassSwitches = PassSwitches(), table: Sequence[Entry] = TABLE
) -> list[Pass]:
    """The passes of a table for a target, in order. Raises KilnError for an unknown name or option."""
    named = [*switches.only, *switches.enable, *switches.disable, *switches.options]
    for name in named:
        if name not in pass_names():
            raise KilnError(f"there is no pass '{name}'; known are {', '.join(pass_names())}")
    chosen: Collection[str] = switches.only or {
        *(entry.name for entry in TABLE if entry.default(target)),
        *switches.enable,
    }
    return [
        _made(entry, target, switches.options.get(entry.name, {}))
        for entry in table
        if entry.name in chosen and entry.name not in switches.disable
    ]


def _made(entry: Entry, target: PassTarget, options: Mapping[str, Any]) -> Pass:
    known = list(inspect.signature(entry.make).parameters)
    if unknown := sorted(set(options) - set(known)):
        raise KilnError(
            f"pass {entry.name} has no option {', '.join(unknown)}; it has {', '.join(known) or 'none at all'}"
        )
    try:
        return entry.make(**{**entry.options(target), **options})
    except (TypeError, ValueError) as error:
        raise KilnError(f"pass {entry.name}: {first_line(error)}") from error


def describe_passes(target: PassTarget) -> Sequence[tuple[str, str, bool]]:
    """Name, effect and whether the target gets it by default, of every pass in order."""
    entries = {entry.name: entry for entry in reversed(TABLE)}
    return [
        (name, _made(entries[name], target, {}).effect.value, entries[name].default(target)) for name in pass_names()
    ]
