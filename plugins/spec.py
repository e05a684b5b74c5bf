"""How operators are described: the types that each folder's schema.py is made of. Knows no operator."""

from collections.abc import Mapping
from dataclasses import dataclass, field

DOMAIN = "kiln"
"""Of all operators that the plugin library implements."""


@dataclass(frozen=True)
class TensorSpec:
    """One operand: `shape` in the symbols of its schema, `dtypes` as numpy/ml_dtypes names."""

    name: str
    shape: tuple[str, ...]
    dtypes: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True)
class OperatorSpec:
    """What a compiled operator and a graph must agree on. An attribute's value is its default, None: required."""

    op_type: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    attributes: Mapping[str, int | float | str | None] = field(hash=False)
    since_version: int = 1
    domain: str = DOMAIN
