"""Options of quantisation. The command line takes its defaults from here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, get_args

from engines.sku import Sku
from passes.quantization.layers import Layer
from passes.quantization.plan import SCHEMES, KvScheme, Rounding, Scheme
from pipeline.calibration import CalibrationConfig
from plugins.errors import KilnError

Quant = Literal["none", "int8", "int4"] | Scheme
"""`int8` and `int4` leave the scheme to the kind of model and the machine; `none` leaves the layers as they are."""
QUANTS: tuple[str, ...] = ("none", "int8", "int4", *(scheme for scheme in SCHEMES if scheme != "float"))
Attention = Literal["auto", "fp32", "bf16"]
ATTENTIONS: tuple[str, ...] = get_args(Attention)
Search = Literal["all", "latency", "sensitivity", "accuracy"]
SEARCHES: tuple[str, ...] = get_args(Search)


@dataclass(frozen=True)
class QuantizeConfig:
    """What to quantise and how much it may cost."""

    quant: str = "int8"
    specs: tuple[str, ...] = ()
    """Calibration data; () for Python's documentation, which every machine has."""
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    table: Path | None = None
    """A calibration table to use instead of calibrating."""
    plan: Path | None = None
    """A plan to use instead of making one."""
    search: Search = "latency"
    """Which layers: `all` that have a kernel; those that are faster (`latency`); those of these that the accuracy
    limits allow, each measured alone (`sensitivity`); or all but the noisiest, as few as accuracy allows (`accuracy`).
    """
    findings: Path | None = None
    """File that keeps what each layer was found to cost, so that a search can go on and be repeated."""
    keep: tuple[str, ...] = ()
    """Layers that stay float: names, or patterns with * and ?."""
    keep_ends: bool = True
    """Whether the first and the last layer keep float activations, and float weights where nothing else is possible."""
    group_size: int | None = None
    rounding: Rounding = "rtn"
    smooth: float | Literal["search", "none"] | None = None
    """SmoothQuant's alpha for layers with INT8 activations; `search` finds each layer's own. None: a search for static
    ranges, which need calibration anyway, and on a GPU, whose rows have one scale; nothing for other dynamic ones."""
    kv: KvScheme = ""
    kv_limit: int | None = None
    """Most tokens of a sequence with an INT8 cache."""
    attention: Attention = "auto"
    """How a decoder's prompts attend on a CPU; `auto`: in BF16 where layers are quantised and it is measured to pay."""
    limits: Path | None = None
    """TOML with limits of the gate."""
    text: Path | None = None
    """Text on which a decoder is judged; None for Python's documentation."""
    samples: Path | None = None
    """An .npz of inputs, perhaps with labels, on which any other model is judged."""
    generate: int = 2048
    """Tokens of a continuation that the gate compares, where the context holds them."""

    def __post_init__(self) -> None:
        if self.quant not in QUANTS:
            raise KilnError(f"--quant is {self.quant!r}; expected one of {', '.join(QUANTS)}")
        for name in ("generate", "group_size", "kv_limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise KilnError(f"--{name.replace('_', '-')} is {value}; expected at least 1")

    def kept(self, layers: list[Layer]) -> list[str]:
        """Names of the layers that `keep` matches. Raises KilnError for a pattern that matches none."""
        names = [layer.name for layer in layers]
        found: list[str] = []
        for pattern in self.keep:
            matches = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
            if not matches:
                raise KilnError(
                    f"--keep {pattern} matches no layer; the model has {len(names)}, such as {', '.join(names[:3])}"
                )
            found += matches
        return list(dict.fromkeys(found))


def refuse_schemes(schemes: Sequence[str], sku: Sku) -> None:
    """Raise KilnError for schemes that a machine type has no arithmetic for."""
    if "fp8" in schemes and not sku.is_cpu and "fp8" not in sku.precisions:
        raise KilnError(f"{sku.name} has no fp8; it offers {', '.join(sku.precisions)}: use --quant int8 or int4")
