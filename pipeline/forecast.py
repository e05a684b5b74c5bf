"""Forecast before a build: what the engine will hold in memory, and how many sequences fit.

Arithmetic on sizes only; rates and rooflines are measured, not forecast here.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.sku import Sku, host_memory
from passes.onnx_model import decoder_from_structure, external_files, load_structure
from pipeline.config import BuildConfig
from plugins.errors import KilnError
from plugins.paged_attention.schema import CACHE_ITEMSIZE

if TYPE_CHECKING:
    from pipeline.load import Description

RESERVE = 0.1
"""Share of memory left to the process itself, activations and the operating system."""
LENGTHS = (512, 2048, 8192, 32768)
_PRECISION_BYTES = {"fp32": 4}


@dataclass(frozen=True)
class Forecast:
    """Sizes in bytes. `sequences` maps a length in tokens to how many such sequences fit beside the weights."""

    sku: str
    memory: int
    weights: int
    kv_bytes_per_token: int | None
    max_context: int | None
    sequences: dict[int, int]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Text for people."""
        text = [f"forecast for {self.sku}: weights {size(self.weights)} of {size(self.memory)} memory"]
        if self.kv_bytes_per_token is not None:
            fits = ", ".join(f"{count} of {length}" for length, count in self.sequences.items())
            text.append(f"KV cache {size(self.kv_bytes_per_token)} per token; sequences that fit: {fits} tokens")
        return text


def forecast_from_description(description: "Description", sku: Sku, config: BuildConfig) -> Forecast:
    """From a configuration, before any weight is read. Raises KilnError for a context that the model cannot have."""
    text = description.config.get_text_config()
    per_token = None
    if description.is_decoder:
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        per_token = 2 * text.num_hidden_layers * kv_heads * head_dim * CACHE_ITEMSIZE[config.kv_dtype]
    positions = getattr(text, "max_position_embeddings", None)
    if config.max_context is not None and positions is not None and config.max_context > positions:
        raise KilnError(
            f"maximum context is {config.max_context}, but {description.architecture} has {positions} positions; "
            f"choose --max-context {positions} or less"
        )
    limit = config.max_context or positions
    return _forecast(sku, description.parameters * _PRECISION_BYTES[config.precision], per_token, limit)


def forecast_from_onnx(path: Path, sku: Sku) -> Forecast:
    """From an ONNX file: the bytes of its initializers as they are stored."""
    proto = load_structure(path)
    weights = sum(file.stat().st_size for file in [path, *external_files(path, proto)])
    decoder = decoder_from_structure(path, proto)
    if decoder is None:
        return _forecast(sku, weights, None, None)
    return _forecast(sku, weights, decoder.kv.bytes_per_token, decoder.max_context)


def forecast_plain(parameters: int, sku: Sku, config: BuildConfig) -> Forecast:
    """For a torch module without a KV cache."""
    return _forecast(sku, parameters * _PRECISION_BYTES[config.precision], None, None)


def refuse_what_cannot_fit(forecast: Forecast) -> None:
    """Raise KilnError when the weights, or not even one short sequence beside them, fit the SKU."""
    usable = int(forecast.memory * (1 - RESERVE))
    if forecast.weights > usable:
        raise KilnError(
            f"the weights take {size(forecast.weights)}, but {forecast.sku} has {size(forecast.memory)} of memory "
            f"({size(usable)} after a reserve of {RESERVE:.0%}); choose a larger SKU or a smaller model"
        )
    if forecast.sequences and max(forecast.sequences.values()) == 0:
        shortest = min(forecast.sequences)
        raise KilnError(
            f"beside {size(forecast.weights)} of weights no sequence of {shortest} tokens fits {forecast.sku} "
            f"({size(forecast.memory)}); choose a larger SKU, --kv-dtype float16, or a lower --max-context"
        )


def size(count: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _forecast(sku: Sku, weights: int, per_token: int | None, max_context: int | None) -> Forecast:
    memory = sku.memory or host_memory()
    sequences = {}
    if per_token is not None:
        room = max(0, int(memory * (1 - RESERVE)) - weights)
        lengths = [length for length in LENGTHS if max_context is None or length < max_context]
        sequences = {
            length: room // (length * per_token) for length in [*lengths, *([max_context] if max_context else [])]
        }
    return Forecast(sku.name, memory, weights, per_token, max_context, sequences)
