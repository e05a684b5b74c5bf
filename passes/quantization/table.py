"""`CalibrationTable`: what running a model on representative data showed about its tensors.

Made by `pipeline.calibration`, used by the rewrites in this folder. It knows the digest of the model that was run and
of the data; ranges of another model are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from plugins.errors import KilnError

Method = Literal["minmax", "percentile", "entropy", "mse"]
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Range:
    """The values that a quantised tensor can hold; those beyond are clipped."""

    low: float
    high: float

    @property
    def magnitude(self) -> float:
        return max(abs(self.low), abs(self.high))


@dataclass(frozen=True)
class TensorStatistics:
    """One activation. Ranges are what the method chose for 8 bits."""

    range: Range
    """Over all data."""
    strata: Mapping[str, Range]
    """By length stratum."""
    channel_magnitudes: tuple[float, ...] = ()
    """Largest magnitude of each channel (the last dimension, or dimension 1 of an image), for SmoothQuant and AWQ."""


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
        return TypeAdapter(CalibrationTable).dump_json(self, indent=1).decode()


def table_from_json(path: Path) -> CalibrationTable:
    """Raises KilnError for a file that is no table, naming the field."""
    try:
        return TypeAdapter(CalibrationTable).validate_json(path.read_bytes())
    except OSError as error:
        raise KilnError(f"the calibration table {path} cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise KilnError(f"the calibration table {path}: field '{where}': {first['msg']}; calibrate again") from error
