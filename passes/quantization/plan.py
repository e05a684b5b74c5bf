"""`PrecisionPlan`: which scheme each layer gets, and why. Read from and written to TOML, for people to edit.

Schemes by weights and activations:

| scheme | weights | activations |
|---|---|---|
| float | as they are | as they are |
| w8a8 | INT8 per channel | INT8, ranges fixed by calibration (Q/DQ) |
| w8a8-dynamic | INT8 per channel, or per group of the depth | INT8, each row its own scales, computed in the engine |
| w4a8-dynamic | INT4 with zeros per group | the same |
| w8a16, w4a16 | INT8, or INT4 with zeros, per group | as they are |
| fp8 | FP8 E4M3 per channel | FP8 E4M3, ranges fixed by calibration (Q/DQ) |
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from plugins.errors import KilnError

Scheme = Literal["float", "w8a8", "w8a8-dynamic", "w4a8-dynamic", "w8a16", "w4a16", "fp8"]
Rounding = Literal["rtn", "gptq", "awq", "hqq"]
"""How weights find their integers: to nearest, by second-order correction, scaled by activations, half-quadratic."""
KvScheme = Literal["", "int8-k", "int8-kv"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
STATIC: tuple[Scheme, ...] = ("w8a8", "fp8")
"""Schemes that need calibrated ranges."""
FOUR_BITS: tuple[Scheme, ...] = ("w4a8-dynamic", "w4a16")
DYNAMIC: tuple[Scheme, ...] = ("w8a8-dynamic", "w4a8-dynamic")
"""Schemes that compute activations' scales in the engine."""


@dataclass(frozen=True)
class LayerPlan:
    """What one layer gets."""

    scheme: Scheme = "float"
    group_size: int = 0
    """Products along the depth that share a weight's scale; 0: all."""
    rounding: Rounding = "rtn"
    smooth: float | None = None
    """SmoothQuant's alpha: how much of the activations' spread moves into the weights; None: nothing."""
    reason: str = ""
    activation_group_size: int = 0
    """Of the dynamic schemes: values of a row that share a scale; 0: all. Else the same as `group_size`."""
    kernel_rows: int | None = None
    """Of Kiln's CUDA products: up to so many rows are multiplied as they are (plugins/quant_matmul/cuda_schema.py);
    None: as many as where nobody measured."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        if self.group_size < 0:
            raise ValueError(f"group_size is {self.group_size}; expected 0 or a number of products")
        if self.activation_group_size not in (0, self.group_size):
            raise ValueError(
                f"activation_group_size is {self.activation_group_size}; expected 0 or group_size, {self.group_size}"
            )
        if self.smooth is not None and not 0 <= self.smooth <= 1:
            raise ValueError(f"smooth is {self.smooth}; expected 0 to 1")


@dataclass(frozen=True)
class PrecisionPlan:
    """A scheme for every layer of one model; layers that are not named stay `float`."""

    model_sha256: str
    """Of the graph that the layers are named in."""
    layers: Mapping[str, LayerPlan]
    kv: KvScheme = ""
    """Caches that are kept as INT8: keys, or keys and values."""
    origin: Mapping[str, str] = field(default_factory=dict)
    """Where it came from, such as the SKU it was measured on and the digest of the calibration table."""
    schema_version: Literal[1] = 1

    __pydantic_config__ = ConfigDict(extra="forbid")

    def of(self, layer: str) -> LayerPlan:
        return self.layers.get(layer, LayerPlan())

    @property
    def quantised(self) -> tuple[str, ...]:
        return tuple(name for name, plan in self.layers.items() if plan.scheme != "float")

    def keeping(self, names: Iterable[str], reason: str) -> "PrecisionPlan":
        """The same with these layers as `float`, smoothed as they were: others may read the same activation."""
        kept = {name: LayerPlan(smooth=self.of(name).smooth, reason=reason) for name in names}
        return replace(self, layers={**self.layers, **kept})

    def require_layers(self, known: Iterable[str]) -> None:
        """Raise KilnError for a plan that names a layer which the model lacks."""
        known = list(known)
        if unknown := [name for name in self.layers if name not in known]:
            raise KilnError(
                f"the plan names the layer {unknown[0]!r}, which the model lacks; it has {len(known)}, "
                f"such as {', '.join(known[:3])}"
            )

    def to_toml(self) -> str:
        """The text of a file that `plan_from_toml` reads."""
        import tomli_w

        document, usual = asdict(self), asdict(LayerPlan())
        document["layers"] = {
            name: {key: value for key, value in layer.items() if value != usual[key] or key == "scheme"}
            for name, layer in document["layers"].items()
        }
        return tomli_w.dumps(document)


def plan_from_toml(path: Path) -> PrecisionPlan:
    """Raises KilnError for a file that is no plan, naming the field."""
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise KilnError(f"the plan {path} cannot be read: {error}") from error
    try:
        return TypeAdapter(PrecisionPlan).validate_python(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise KilnError(f"the plan {path}: field '{where}': {first['msg']}; found {first['input']!r}") from error
