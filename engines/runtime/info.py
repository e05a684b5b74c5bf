"""What an engine says about itself. Data only; can be sent to another process or printed as JSON."""

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class TensorInfo:
    """An input or output: NumPy dtype name; a dimension that varies is a name, or None without one."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


@dataclass(frozen=True)
class EngineInfo:
    """An opened engine. Decoders have lengths and blocks, plain models have inputs and outputs."""

    name: str
    kind: Literal["decoder", "model"]
    source: str = ""
    """What it was built from."""
    sha256: str = ""
    """The bundle's identity; empty for an engine without one."""
    sku: str = ""
    created: str = ""
    """ISO 8601."""
    tokenizer: str | None = None
    """Folder of the tokenizer."""
    max_length: int = 0
    """Most tokens of prompt and answer together."""
    vocab_size: int = 0
    block_size: int = 0
    num_blocks: int = 0
    inputs: tuple[TensorInfo, ...] = ()
    outputs: tuple[TensorInfo, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
