"""Random inputs that a model accepts: sizes for its dynamic dimensions, values within its ranges.

Ranges come from example inputs where there are any, else from the graph: an integer input that selects
rows of a table must stay below the table's length. Masks get padding at their ends.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engines.manifest import TensorRecord
from passes.onnx_model import Tensor, load_structure
from plugins.errors import KilnError

if TYPE_CHECKING:
    import onnx

_PASSES_VALUES_ON = {"Cast", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Flatten", "Transpose", "Expand"}


@dataclass(frozen=True)
class InputSpec:
    """One input; a dynamic dimension is a string. Values lie in [low, high], integers include both ends.

    `sizes` are an example's sizes of all dimensions, the smallest that samples use for dynamic ones.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    low: float = -1.0
    high: float = 1.0
    sizes: tuple[int, ...] | None = None

    @property
    def is_mask(self) -> bool:
        return "mask" in self.name and np.dtype(self.dtype).kind in "iub"


def samples_from_inputs(specs: Sequence[InputSpec], count: int, seed: int) -> list[dict[str, NDArray]]:
    """`count` sets of inputs, reproducible from `seed`; a symbol has one size within a set and others in the next."""
    generator = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        sizes = _sizes(specs, generator)
        samples.append({spec.name: _values(spec, _shape(spec, sizes), generator) for spec in specs})
    return samples


def sample_of_batch(specs: Sequence[InputSpec], batch: int, seed: int) -> dict[str, NDArray]:
    """One set of inputs whose first dimensions, where dynamic, are `batch`; others take their smallest sizes."""
    generator = np.random.default_rng(seed)
    sizes = {name: smallest for spec in specs for name, smallest in _dynamic(spec)}
    sizes |= {spec.shape[0]: batch for spec in specs if spec.shape and isinstance(spec.shape[0], str)}
    return {spec.name: _values(spec, _shape(spec, sizes), generator) for spec in specs}


def sample_of_sizes(specs: Sequence[InputSpec], batch: int, size: int, seed: int) -> dict[str, NDArray]:
    """One set of inputs whose first dimensions, where dynamic, are `batch` and whose other dynamic ones are `size`."""
    generator = np.random.default_rng(seed)
    leading = {spec.shape[0] for spec in specs if spec.shape}
    sizes = {name: batch if name in leading else size for spec in specs for name, _ in _dynamic(spec)}
    return {spec.name: _values(spec, _shape(spec, sizes), generator) for spec in specs}


def _dynamic(spec: InputSpec) -> Iterable[tuple[str, int]]:
    """Symbol and smallest size of each dynamic dimension. 32 suits networks that halve an image five times."""
    for axis, size in enumerate(spec.shape):
        if isinstance(size, str):
            yield size, spec.sizes[axis] if spec.sizes else (1 if axis == 0 else 32)


def _sizes(specs: Sequence[InputSpec], generator: np.random.Generator) -> dict[str, int]:
    """Leading dimensions (batches) get 1 to 4, others one to three times their smallest size."""
    leading = {spec.shape[0] for spec in specs if spec.shape}
    smallest = {name: size for spec in specs for name, size in _dynamic(spec)}
    return {
        name: int(generator.integers(1, 5)) if name in leading else size * int(generator.integers(1, 4))
        for name, size in smallest.items()
    }


def _shape(spec: InputSpec, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else sizes[size] for size in spec.shape)


def _values(spec: InputSpec, shape: tuple[int, ...], generator: np.random.Generator) -> NDArray:
    dtype = np.dtype(spec.dtype)
    if spec.is_mask and len(shape) >= 2:
        lengths = generator.integers(1, shape[-1] + 1, shape[:-1])[..., None]
        return (np.arange(shape[-1]) < lengths).astype(dtype)
    if dtype.kind == "f":
        return generator.uniform(spec.low, spec.high, shape).astype(dtype)
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        return generator.integers(int(spec.low), int(spec.high) + 1, shape).astype(dtype)
    raise KilnError(f"input '{spec.name}' has dtype {spec.dtype}, for which no random values are defined")


def input_specs_from_graph(path: Path, inputs: Iterable[Tensor | TensorRecord]) -> tuple[InputSpec, ...]:
    """Specs of a graph's inputs, with integer ranges read from the file; 0 to 1 where it sets no bound."""
    graph = load_structure(path).graph
    specs = []
    for tensor in inputs:
        if np.dtype(tensor.dtype).kind in "iu":
            rows = _table_rows(graph, tensor.name)
            specs.append(InputSpec(tensor.name, tensor.dtype, tensor.shape, 0, rows - 1 if rows else 1))
        else:
            specs.append(InputSpec(tensor.name, tensor.dtype, tensor.shape))
    return tuple(specs)


def _table_rows(graph: "onnx.GraphProto", name: str) -> int | None:
    """Length of the shortest table that values of `name` select rows of through Gather."""
    tables = {initializer.name: tuple(initializer.dims) for initializer in graph.initializer}
    carriers, found = {name}, []
    for node in graph.node:  # topological order
        if node.op_type == "Gather" and node.input[1] in carriers and node.input[0] in tables:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
            found.append(tables[node.input[0]][axis])
        elif node.op_type in _PASSES_VALUES_ON and node.input[0] in carriers:
            carriers.update(node.output)
    return min(found, default=None)


def merged_inputs(a: Sequence[InputSpec], b: Sequence[InputSpec]) -> tuple[InputSpec, ...]:
    """Specs that suit both models, in A's order. Raises KilnError where their inputs differ."""
    by_name = {spec.name: spec for spec in b}
    if {spec.name for spec in a} != set(by_name):
        names = " and ".join(", ".join(sorted(spec.name for spec in specs)) or "none" for specs in (a, b))
        raise KilnError(f"the inputs differ: A and B take {names}; both must have the same inputs under the same names")
    return tuple(_merged(spec, by_name[spec.name]) for spec in a)


def _merged(a: InputSpec, b: InputSpec) -> InputSpec:
    """A's range where it has examples, else B's where it has, narrowed to what both accept; fixed sizes win."""
    if a.dtype != b.dtype or len(a.shape) != len(b.shape):
        raise KilnError(
            f"input '{a.name}' is {a.dtype} {list(a.shape)} in A and {b.dtype} {list(b.shape)} in B; they must be alike"
        )
    base, other = (b, a) if b.sizes and not a.sizes else (a, b)
    shape = []
    for x, y in zip(base.shape, other.shape, strict=True):
        if isinstance(x, int) and isinstance(y, int) and x != y:
            raise KilnError(f"input '{a.name}' has shape {list(a.shape)} in A and {list(b.shape)} in B")
        shape.append(y if isinstance(y, int) else x)
    low, high = base.low, base.high
    if np.dtype(a.dtype).kind in "iu":
        low, high = max(a.low, b.low), min(a.high, b.high)
    return InputSpec(base.name, base.dtype, tuple(shape), low, high, base.sizes)
