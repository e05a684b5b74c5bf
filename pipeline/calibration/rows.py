"""Some rows of what enters matrix products, spread evenly over all data: what a search tries its choices on."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.calibration.observe import ObserveConfig, run_over
from pipeline.calibration.samples import CalibrationSet, Sample
from pipeline.calibration.subject import CalibrationModel
from pipeline.progress import Progress

Matrix = NDArray[np.float32]


def rows_of(
    model: CalibrationModel,
    data: CalibrationSet,
    config: ObserveConfig,
    tensors: Sequence[str],
    most: int = 256,
    progress: Progress | None = None,
) -> dict[str, Matrix]:
    """From `most` / 2 to `most` rows [n, depth] of each tensor, or all where there are fewer; {} for no tensors."""
    if not tensors:
        return {}
    found = {name: _EvenRows(most) for name in tensors}

    def take(sample: Sample, name: str, values: NDArray[np.float32]) -> None:
        found[name].add(values.reshape(-1, values.shape[-1]))

    run_over(model, data, list(tensors), take, config, progress)
    return {name: rows.matrix for name, rows in found.items()}


class _EvenRows:
    """Every so many rows of a stream of unknown length: where there are too many, every second one goes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._step = 1
        self._seen = 0
        self._kept: list[Matrix] = []

    def add(self, rows: Matrix) -> None:
        self._kept += [row.copy() for row in rows[-self._seen % self._step :: self._step]]
        self._seen += len(rows)
        while len(self._kept) > self._most:
            self._kept = self._kept[::2]
            self._step *= 2

    @property
    def matrix(self) -> Matrix:
        return np.stack(self._kept)
