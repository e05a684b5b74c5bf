"""Options of a build. The command line takes its defaults from here."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from engines.sku import Sku
from passes.standard import IoLayout, PassSwitches, PassTarget, standard_passes
from pipeline.quantize.config import QuantizeConfig
from plugins.errors import KilnError
from plugins.paged_attention.schema import EXPORT_DTYPES, CacheDtype

Precision = Literal["fp32", "fp16", "bf16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
KV_DTYPES: dict[Precision, CacheDtype] = {"fp32": "float16", "fp16": "float16", "bf16": "bfloat16"}
"""What a GPU's attention computes in and keeps its cache in: always 16 bits."""


@dataclass(frozen=True)
class BuildConfig:
    """How to build. `max_context` in tokens, None for the model's own; `out` None for `bundles/NAME-SKU`.

    `precision` None is fp32 for a CPU and fp16 for a GPU; `kv_dtype` None is float32 for a CPU, and for a GPU the
    precision's own type. `sku_file` is a TOML file with SKUs of the user's own.
    """

    precision: Precision | None = None
    kv_dtype: CacheDtype | None = None
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
            if value is not None and value not in known:
                raise KilnError(f"{name} is {value!r}; expected one of {', '.join(known)}")
        standard_passes(PassTarget(), self.passes)  # refuses unknown names before any work
        if not 1 <= self.block_size <= 256:
            raise KilnError(f"block size is {self.block_size}; expected 1 to 256 tokens")
        if self.max_context is not None and self.max_context < 1:
            raise KilnError(f"maximum context is {self.max_context}; expected at least 1 token")

    def for_sku(self, sku: Sku) -> "SkuConfig":
        """What the choices come to for a machine type. Raises KilnError for a cache that its attention lacks."""
        precision: Precision = self.precision or ("fp32" if sku.is_cpu else "fp16")
        own = KV_DTYPES[precision]
        cache = self.kv_dtype or ("float32" if sku.is_cpu else own)
        if not sku.is_cpu and cache != own:
            raise KilnError(
                f"--kv-dtype is {cache}, but on {sku.name} attention computes in its cache's type, which for "
                f"--precision {precision} is {own}; leave --kv-dtype out"
            )
        return SkuConfig(precision, cache, self.max_context)


@dataclass(frozen=True)
class SkuConfig:
    """A build's precision and cache for one machine type; what `pipeline.forecast` asks for."""

    precision: Precision
    kv_dtype: CacheDtype
    max_context: int | None
