"""Whether a model gives a request in a batch what it gives it alone, found out on the first batches that really come.

The names of dimensions promise it, but a graph may normalise over the batch, scale by the largest value of all rows,
or ignore the mask in a pooling layer. So the first batches are computed both ways, and callers get what was computed
alone, until the two agreed on requests that differ. Knows nothing of queues; errors of the model are the caller's.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engines.runtime.shape_buckets import Arrays, BatchLayout

_log = logging.getLogger(__name__)

_ALIKE = 8
"""Batches of nothing but equal requests, which prove little, that are computed both ways before they are believed."""


class BatchCheck:
    """The layout that may be used, and whether results of a batch can be handed out unseen."""

    def __init__(self, layout: BatchLayout, tolerance: float, model: str) -> None:
        self.layout = layout
        self._tolerance = tolerance
        self._model = model
        self._trusted = {True: False, False: False}  # by whether requests were padded
        self._alike = 0

    def allows(self, padded: bool) -> bool:
        """Whether requests may still be run together; some that were queued as alike may be taken later."""
        return (self.layout.length if padded else self.layout.batch) is not None

    def trusted(self, padded: bool) -> bool:
        return self._trusted[padded]

    def judge(
        self, requests: Sequence[Arrays], together: Sequence[Arrays] | None, alone: Sequence[Arrays], padded: bool
    ) -> None:
        """Compare one batch computed both ways; `together` is None where only the batch failed."""
        if together is None:
            self._refuse(padded, "the model fails on several requests at once and not on each alone")
            return
        error = max(map(relative_error, together, alone))
        if not error <= self._tolerance:
            self._refuse(
                padded,
                f"results differ from those alone by {error:.2g} of the largest value, more than the tolerance of "
                f"{self._tolerance:g}",
            )
            return
        if not padded and all(_equal(requests[0], other) for other in requests[1:]):
            self._alike += 1
            if self._alike < _ALIKE:
                return
        self._trusted[False] = True
        self._trusted[padded] = True

    def _refuse(self, padded: bool, reason: str) -> None:
        if padded:
            self.layout = replace(self.layout, length=None)
            _log.warning("%s: requests of different length are not padded any more: %s", self._model, reason)
        else:
            self.layout = replace(self.layout, batch=None, length=None)
            _log.warning("%s: requests are run one by one from now on: %s", self._model, reason)


def needs_padding(requests: Sequence[Arrays]) -> bool:
    """Whether requests of one batch differ in more than their rows."""
    return any(
        array.shape[1:] != requests[0][name].shape[1:] for inputs in requests[1:] for name, array in inputs.items()
    )


def relative_error(found: Arrays, expected: Arrays) -> float:
    """Largest difference of any output, relative to that output's largest value; where both are NaN there is none.

    Infinite where shapes differ, or where only one is finite, or where others than floats differ.
    """
    return max((_relative_error(array, expected[name]) for name, array in found.items()), default=0.0)


def _relative_error(found: NDArray, expected: NDArray) -> float:
    if found.shape != expected.shape:
        return float("inf")
    if not np.issubdtype(expected.dtype, np.floating):
        return 0.0 if np.array_equal(found, expected) else float("inf")
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(expected)
    if not np.array_equal(found[~finite], expected[~finite], equal_nan=True) or not np.isfinite(found[finite]).all():
        return float("inf")
    difference = np.abs(found[finite] - expected[finite]).max(initial=0.0)
    scale = np.abs(expected[finite]).max(initial=0.0)
    return 0.0 if difference == 0 else float(difference / scale) if scale else float("inf")


def _equal(first: Arrays, second: Arrays) -> bool:
    return all(np.array_equal(array, second[name]) for name, array in first.items())
