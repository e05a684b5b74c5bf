"""`CalibrationTable`: what running a model on representative data showed about its tensors.

Made by `pipeline.calibration`, used by the rewrites in this folder. It knows the digest of the model that was run and
of the data; ranges of another model are refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from plugins.errors import KilnError, first_problem

Method = Literal["minmax", "percentile", "entropy", "mse"]
_DIGITS = 6
"""Of the numbers in the file: more than a scale is good for."""


@dataclass(frozen=True)
class Range:
    """The values that a quantised tensor can hold; those beyond are clipped."""

    low: float
    high: float

    @property
    def magnitude(self) -> float:
        return max(abs(self.low), abs(self.high))


@dataclass(frozen=True)
class ChannelRanges:
    """What the method chose for each channel, over all data."""

    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class TensorStatistics:
    """One activation. Ranges are what the method chose for 8 bits; they hold 0, and symmetric ones are [-m, m]."""

    range: Range
    """Over all data."""
    strata: Mapping[str, Range]
    """By length stratum."""
    channel_magnitudes: tuple[float, ...] = ()
    """Largest magnitude of each channel (the last dimension, or dimension 1 of an image), for SmoothQuant and AWQ."""
    mean_magnitudes: tuple[float, ...] = ()
    """Mean magnitude of each channel, for AWQ; empty unless asked for."""
    channels: ChannelRanges | None = None
    """None unless asked for."""


@dataclass(frozen=True)
class CalibrationTable:
    """Statistics by tensor name."""

    model_sha256: str
    data_sha256: str
    method: Method
    symmetric: bool
    tensors: Mapping[str, TensorStatistics]
    samples: Mapping[str, int]
    """How many samples each stratum had."""
    warnings: tuple[str, ...] = ()
    """What was accepted although it speaks against the data, such as strata that it does not cover."""
    percentile: float | None = None
    """Of the method of that name."""
    schema_version: Literal[1] = 1

    __pydantic_config__ = ConfigDict(extra="forbid")

    def require_model(self, sha256: str) -> None:
        """Raise KilnError unless the table was made from this model."""
        if sha256 != self.model_sha256:
            raise KilnError(
                f"the calibration table was made from the model {self.model_sha256[:12]}, this one is {sha256[:12]}; "
                "calibrate again"
            )

    def of(self, tensor: str) -> TensorStatistics:
        """Raises KilnError for a tensor that was not observed."""
        if tensor not in self.tensors:
            raise KilnError(f"the calibration table has no ranges for the tensor '{tensor}'; calibrate again")
        return self.tensors[tensor]

    def to_json(self) -> str:
        """The text of a file that `table_from_json` reads, one tensor a line; numbers are rounded to 6 digits."""
        document = _rounded(TypeAdapter(CalibrationTable).dump_python(self, exclude_defaults=True))
        tensors = document.pop("tensors")
        lines = [f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in tensors.items()]
        document["schema_version"] = self.schema_version
        head = json.dumps(document, indent=1).removesuffix("\n}")
        return f'{head},\n "tensors": {{\n  ' + ",\n  ".join(lines) + "\n }\n}\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def table_from_json(path: Path) -> CalibrationTable:
    """Raises KilnError for a file that is no table, naming the field."""
    try:
        return TypeAdapter(CalibrationTable).validate_json(path.read_bytes())
    except OSError as error:
        raise KilnError(f"the calibration table {path} cannot be read: {error}") from error
    except ValidationError as error:
        where, problem = first_problem(error)
        raise KilnError(f"the calibration table {path}: field '{where}': {problem}; calibrate again") from error
