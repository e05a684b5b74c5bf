"""Options of a build. The command line takes its defaults from here."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from passes.standard import IoLayout, PassSwitches, PassTarget, standard_passes
from pipeline.quantize.config import QuantizeConfig
from plugins.errors import KilnError
from plugins.paged_attention.schema import EXPORT_DTYPES, CacheDtype

Precision = Literal["fp32"]
PRECISIONS: tuple[str, ...] = get_args(Precision)


@dataclass(frozen=True)
class BuildConfig:
    """How to build. `max_context` in tokens, None for the model's own; `out` None for `bundles/NAME-SKU`.

    `sku_file` is a TOML file with SKUs of the user's own.
    """

    precision: Precision = "fp32"
    kv_dtype: CacheDtype = "float32"
    block_size: int = 16
    max_context: int | None = None
    out: Path | None = None
    io_layout: IoLayout = "nchw"
    passes: PassSwitches = field(default_factory=PassSwitches)
    verify_passes: bool = True
    measure_passes: bool = False
    inputs: Path | None = None
    quantize: QuantizeConfig | None = None
    sku_file: Path | None = None
    elsewhere: bool = False
    """Also for a CPU that this machine is not: the engine is checked with this machine's kernels, not its own."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("precision", self.precision, PRECISIONS),
            ("kv_dtype", self.kv_dtype, EXPORT_DTYPES),
        ):
            if value not in known:
                raise KilnError(f"{name} is {value!r}; expected one of {', '.join(known)}")
        standard_passes(PassTarget(), self.passes)  # refuses unknown names before any work
        if not 1 <= self.block_size <= 256:
            raise KilnError(f"block size is {self.block_size}; expected 1 to 256 tokens")
        if self.max_context is not None and self.max_context < 1:
            raise KilnError(f"maximum context is {self.max_context}; expected at least 1 token")
