"""Which requests of a plain model may share a call, how their arrays become one, and how the results part again.

Read from the names of the graph's dimensions. A batch is possible where one name leads every input and every output;
padding is possible where an `attention_mask` [batch, length] tells the model what to leave out, and every other
dimension is fixed or one of these two. Knows nothing of queues, and does not know whether a model keeps what its names
promise: `engines.runtime.batch_check` finds out.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.runtime.info import TensorInfo
from plugins.errors import KilnError

MASK = "attention_mask"

Arrays = Mapping[str, NDArray]
Outputs = dict[str, NDArray]


class BatchShapeError(KilnError):
    """A model's outputs do not have the shape that the names of their dimensions promise."""


@dataclass(frozen=True)
class BatchLayout:
    """Names of the dimensions that requests may differ in."""

    tensors: dict[str, TensorInfo]
    """Inputs and outputs; a graph has no name twice."""
    batch: str | None
    """First dimension of everything; None: requests run alone."""
    length: str | None
    """Dimension that may be padded; None: only equal shapes share a call."""

    def rows(self, inputs: Arrays) -> int | None:
        """Rows of one request; None where it can share with nobody."""
        if self.batch is None:
            return None
        rows = {array.shape[0] for array in inputs.values()}
        return rows.pop() if len(rows) == 1 and rows != {0} else None

    def lengths(self, inputs: Arrays) -> set[int]:
        """Sizes of the dimension that may be padded: one, if the request is well formed."""
        return {
            size
            for name, array in inputs.items()
            for dim, size in zip(self.tensors[name].shape, array.shape, strict=True)
            if dim is not None and dim == self.length
        }

    def key(self, inputs: Arrays, buckets: Sequence[int]) -> tuple[Hashable, int | None]:
        """What requests of one batch have in common, and the upper end of their bucket where they may be padded."""
        lengths = self.lengths(inputs)
        bucket = None
        if len(lengths) == 1:
            bucket = next((bucket for bucket in buckets if bucket >= max(lengths)), None)
        if bucket is None:
            return tuple((name, inputs[name].shape[1:]) for name in sorted(inputs)), None
        return bucket, bucket

    def merge(self, requests: Sequence[Arrays]) -> Outputs:
        """One array for each input: the requests' rows after each other, shorter ones with zeros behind."""
        if len(requests) == 1:
            return dict(requests[0])
        return {name: _stacked([request[name] for request in requests]) for name in requests[0]}

    def part(self, outputs: Arrays, requests: Sequence[Arrays]) -> list[Outputs]:
        """Each request's own rows without its padding, as arrays of their own: no result keeps the others in memory.

        Raises BatchShapeError when the outputs do not have the rows, or the length, of the merged inputs.
        """
        rows = [len(next(iter(request.values()))) for request in requests]
        lengths = [max(self.lengths(request), default=0) for request in requests]
        for name, array in outputs.items():
            dims = self.tensors[name].shape
            expected = tuple(
                sum(rows) if axis == 0 else max(lengths) if dim is not None and dim == self.length else size
                for axis, (dim, size) in enumerate(zip(dims, array.shape, strict=True))
            )
            if array.shape != expected:
                raise BatchShapeError(
                    f"output {name} has shape {list(array.shape)}, expected {list(expected)} for {sum(rows)} rows; "
                    "the names of its dimensions are wrong: export the model again, or open the engine with max_batch=1"
                )
        parts, start = [], 0
        for count, length in zip(rows, lengths, strict=True):
            own = slice(start, start + count)
            parts.append({name: array[self._cut(name, own, length)].copy() for name, array in outputs.items()})
            start += count
        return parts

    def _cut(self, name: str, rows: slice, length: int) -> tuple[slice, ...]:
        dims = self.tensors[name].shape[1:]
        return (rows, *(slice(length if dim is not None and dim == self.length else None) for dim in dims))


def layout_from_tensors(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]) -> BatchLayout:
    """How requests to a model with these inputs and outputs may share a call."""
    tensors = {tensor.name: tensor for tensor in (*inputs, *outputs)}
    leading = {tensor.shape[0] if tensor.shape else None for tensor in tensors.values()}
    name = leading.pop() if len(leading) == 1 else None
    batch = name if isinstance(name, str) else None
    if batch is None:
        return BatchLayout(tensors, None, None)
    return BatchLayout(tensors, batch, _length_dim(tensors, batch, {tensor.name for tensor in inputs}))


def _length_dim(tensors: Mapping[str, TensorInfo], batch: str, inputs: set[str]) -> str | None:
    mask = tensors[MASK].shape if MASK in inputs else ()
    length = mask[1] if len(mask) == 2 else None
    if not isinstance(length, str) or length == batch:
        return None
    others = {dim for tensor in tensors.values() for dim in tensor.shape[1:] if not isinstance(dim, int)}
    return length if others == {length} else None


def _stacked(arrays: Sequence[NDArray]) -> NDArray:
    if len({array.shape[1:] for array in arrays}) == 1:
        return np.concatenate(arrays)
    longest = [max(sizes) for sizes in zip(*(array.shape[1:] for array in arrays), strict=True)]
    stacked = np.zeros((sum(map(len, arrays)), *longest), arrays[0].dtype)
    start = 0
    for array in arrays:
        stacked[(slice(start, start + len(array)), *map(slice, array.shape[1:]))] = array
        start += len(array)
    return stacked
