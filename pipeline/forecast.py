"""Forecast before a build: what the engine holds in memory, how many sequences fit, and how fast it could be at best.

Arithmetic on sizes and on the SKU table. What the engine then reaches is measured by `kiln bench`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engines.sku import Precision, Sku, host_memory
from passes.onnx_model import decoder_from_structure, external_files, load_structure
from pipeline.floors import AttentionLayer, DecoderWork, PlainWork, decoder_work_from_graph
from pipeline.roofline import Roofline, decoder_roofline, plain_roofline
from plugins.errors import KilnError
from plugins.paged_attention.schema import CACHE_ITEMSIZE, CacheDtype

if TYPE_CHECKING:
    import onnx

    from pipeline.load import Description

RESERVE = 0.1
"""Share of memory left to the process itself, activations and the operating system."""
LENGTHS = (512, 2048, 8192, 32768)
WEIGHT_BYTES: dict[Precision, float] = {
    "fp32": 4,
    "tf32": 4,
    "fp16": 2,
    "bf16": 2,
    "int8": 1,
    "fp8": 1,
    "fp4": 0.5,
}
"""Of one weight, without scales."""


class ForecastOptions(Protocol):
    """What of a build decides its sizes; `SkuConfig` has it."""

    @property
    def precision(self) -> Precision: ...
    @property
    def kv_dtype(self) -> CacheDtype: ...
    @property
    def max_context(self) -> int | None: ...


@dataclass(frozen=True)
class Forecast:
    """Sizes in bytes. `sequences` maps a length in tokens to the largest batch of such sequences beside the weights.

    `most_samples` is the largest batch of a model without a KV cache, None where its activations are unknown;
    `roofline` is None where the SKU lacks a rate or the model's work is unknown.
    """

    sku: str
    memory: int
    weights: int
    kv_bytes_per_token: int | None
    max_context: int | None
    sequences: dict[int, int]
    most_samples: int | None = None
    roofline: Roofline | None = None
    unsupported: Precision | None = None
    """The precision, where the SKU does not multiply it."""
    plugin_free: bool = False
    """A decoder whose attention has no plugin on the SKU."""

    @property
    def usable(self) -> int:
        """Memory after the reserve."""
        return int(self.memory * (1 - RESERVE))

    @property
    def problem(self) -> str | None:
        """Why it does not fit, with the ways out; None where it fits."""
        if self.unsupported is not None:
            return f"{self.sku} does not multiply {self.unsupported}; choose another precision or SKU"
        if self.weights > self.usable:
            return (
                f"the weights take {size(self.weights)}, but {self.sku} has {size(self.memory)} of memory "
                f"({size(self.usable)} after a reserve of {RESERVE:.0%}); choose a larger SKU or a smaller model"
            )
        if self.sequences and max(self.sequences.values()) == 0:
            return (
                f"beside {size(self.weights)} of weights no sequence of {min(self.sequences)} tokens fits {self.sku} "
                f"({size(self.memory)}); choose a larger SKU, --kv-dtype float16, or a lower --max-context"
            )
        if self.most_samples == 0:
            return f"beside {size(self.weights)} of weights not even one sample fits {self.sku} ({size(self.memory)})"
        return None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.problem is None}

    def lines(self) -> list[str]:
        """Text for people."""
        text = [f"forecast for {self.sku}: weights {size(self.weights)} of {size(self.memory)} memory"]
        if self.kv_bytes_per_token is not None:
            fits = ", ".join(f"{count} of {length}" for length, count in self.sequences.items())
            text.append(f"KV cache {size(self.kv_bytes_per_token)} per token; sequences that fit: {fits} tokens")
        if self.most_samples is not None:
            text.append(f"samples that fit in one call: {self.most_samples}")
        if self.plugin_free:
            text.append("the attention plugin does not run there: only the plugin-free form would")
        if self.roofline is not None:
            text.append(self.roofline.sentence())
        return text


def forecast_from_description(description: "Description", sku: Sku, config: ForecastOptions) -> Forecast:
    """From a configuration, before any weight is read. Raises KilnError for a context that the model cannot have."""
    if not description.is_decoder:
        return forecast_plain(description.parameters, sku, config)
    text = description.config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if config.max_context is not None and positions is not None and config.max_context > positions:
        raise KilnError(
            f"maximum context is {config.max_context}, but {description.architecture} has {positions} positions; "
            f"choose --max-context {positions} or less"
        )
    work = decoder_work_from_description(description, config)
    weights = int(description.parameters * WEIGHT_BYTES[config.precision])
    return _of_decoder(sku, config.precision, weights, work, config.max_context or positions)


def decoder_work_from_description(description: "Description", config: ForecastOptions) -> DecoderWork:
    """What a step will do at least, as `decoder_work_from_graph` counts it of the exported graph.

    Every parameter that is not in the table of tokens counts as a product's: norms and biases are about 0.1 % of them.
    """
    text = description.config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    table = text.vocab_size * text.hidden_size
    body = description.parameters - (table if getattr(text, "tie_word_embeddings", False) else 2 * table)
    kinds = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
    windows = [getattr(text, "sliding_window", None) if kind == "sliding_attention" else None for kind in kinds]
    return DecoderWork(
        body_parameters=body,
        head_parameters=table,
        weight_bytes=int((body + table) * WEIGHT_BYTES[config.precision]),
        layers=tuple(AttentionLayer(heads, head_dim, window) for window in windows),
        kv_bytes_per_token=2 * text.num_hidden_layers * kv_heads * head_dim * CACHE_ITEMSIZE[config.kv_dtype],
    )


def forecast_from_onnx(path: Path, sku: Sku, work: PlainWork | None = None) -> Forecast:
    """From an ONNX file: the bytes of its initializers as they are stored. `work` is a plain model's, where known."""
    proto = load_structure(path)
    weights = sum(file.stat().st_size for file in [path, *external_files(path, proto)])
    precision = precision_from_graph(proto)
    decoder = decoder_from_structure(path, proto)
    if decoder is not None:
        return _of_decoder(sku, precision, weights, decoder_work_from_graph(path, decoder), decoder.max_context)
    forecast = _of_plain(sku, precision, weights)
    if work is None or forecast.unsupported is not None:
        return forecast
    most = None
    if work.activation_bytes:
        most = max(0, int((forecast.usable - weights) / work.activation_bytes))
    roofline = plain_roofline(work, sku, precision, [batch for batch in dict.fromkeys((1, most or 1)) if batch])
    return replace(forecast, most_samples=most, roofline=roofline)


def forecast_plain(parameters: int, sku: Sku, config: ForecastOptions) -> Forecast:
    """For a torch module without a KV cache."""
    return _of_plain(sku, config.precision, int(parameters * WEIGHT_BYTES[config.precision]))


def precision_from_graph(proto: "onnx.ModelProto") -> Precision:
    """The type that most bytes of a graph's weights have; of quantised weights that of their integers."""
    import math

    import onnx

    types: dict[int, Precision] = {
        onnx.TensorProto.FLOAT: "fp32",
        onnx.TensorProto.FLOAT16: "fp16",
        onnx.TensorProto.BFLOAT16: "bf16",
        onnx.TensorProto.INT8: "int8",
        onnx.TensorProto.UINT8: "int8",
        onnx.TensorProto.FLOAT8E4M3FN: "fp8",
    }
    found: dict[Precision, float] = {}
    for tensor in proto.graph.initializer:
        if precision := types.get(tensor.data_type):
            found[precision] = found.get(precision, 0) + math.prod(tensor.dims) * WEIGHT_BYTES[precision]
    return max(found, key=lambda name: found[name], default="fp32")


def refuse_what_cannot_fit(forecast: Forecast) -> None:
    """Raise KilnError when the weights, or not even one short sequence beside them, fit the SKU."""
    if forecast.problem is not None:
        raise KilnError(forecast.problem)


def size(count: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _of_plain(sku: Sku, precision: Precision, weights: int) -> Forecast:
    unsupported = None if precision in sku.precisions else precision
    return Forecast(sku.name, sku.memory or host_memory(), weights, None, None, {}, unsupported=unsupported)


def _of_decoder(sku: Sku, precision: Precision, weights: int, work: DecoderWork, max_context: int | None) -> Forecast:
    forecast = _of_plain(sku, precision, weights)
    room = max(0, forecast.usable - weights)
    lengths = _lengths(max_context)
    sequences = {length: room // (length * work.kv_bytes_per_token) for length in lengths}
    roofline = decoder_roofline(work, sku, precision, lengths, sequences)
    return replace(
        forecast,
        kv_bytes_per_token=work.kv_bytes_per_token,
        max_context=max_context,
        sequences=sequences,
        roofline=roofline,
        plugin_free=not sku.runs_attention_plugin,
    )


def _lengths(max_context: int | None) -> Sequence[int]:
    """Contexts to forecast for: the usual ones below the longest, and that."""
    shorter = [length for length in LENGTHS if max_context is None or length < max_context]
    return [*shorter, *([max_context] if max_context else [])]
