"""Random small models for tests of passes, valid by construction: what the families of networks are built with.

A generator draws all of its decisions from a `random.Random`: one that hypothesis drives, so that failures shrink, or
one with a seed. Sizes are tracked as `Dim`: what a dimension is in each run of the model. Weights are scaled so that
values stay near 1, and nothing is discontinuous, since passes may change the last bits of what a comparison reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSETS = (11, 13, 17, 18, 21, 23)
Dim = tuple[int, ...]
"""One size per run."""


@dataclass(frozen=True)
class Drawn:
    """A model and its inputs, one set a run."""

    model: onnx.ModelProto
    feeds: tuple[dict[str, NDArray], ...]


@dataclass
class Net:
    """A graph under construction. Methods that add a node return the names of its outputs."""

    random: Random
    opset: int
    runs: int = 2
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    feeds: list[dict[str, NDArray]] = field(default_factory=list)
    parent: "Net | None" = None

    def __post_init__(self) -> None:
        if self.parent is None:
            self.weights = np.random.default_rng(self.random.getrandbits(32))
            self.feeds = [{} for _ in range(self.runs)]
            self.named = self.chance(0.5)
            self.count = 0

    @property
    def root(self) -> "Net":
        return self if self.parent is None else self.parent.root

    def branch(self) -> "Net":
        """A graph inside this one, which may read its tensors."""
        return Net(self.random, self.opset, self.runs, parent=self)

    # decisions

    def chance(self, probability: float) -> bool:
        return self.random.random() >= 1 - probability  # 0, the simplest draw, decides against it

    def pick(self, *options: Any) -> Any:
        return options[self.random.randrange(len(options))]

    # parts of a graph

    def name(self) -> str:
        self.root.count += 1
        return f"t{self.root.count}"

    def input(self, name: str, dims: Sequence[Dim | tuple[Dim, str]], values: Any = None) -> str:
        """`values(shape)` makes the values, normal ones if None; a dim with a name is symbolic."""
        sizes = [dim if isinstance(dim[0], int) else dim[0] for dim in dims]
        shape = [dim[0] if isinstance(dim[0], int) else dim[1] for dim in dims]
        make = values or self.root.weights.standard_normal
        for run, feeds in enumerate(self.feeds):
            array = np.asarray(make(tuple(size[run] for size in sizes)))
            feeds[name] = array.astype(np.float32) if array.dtype == np.float64 else array
        kind = helper.np_dtype_to_tensor_dtype(feeds[name].dtype)
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, tensor: str, rank: int, kind: int = TensorProto.FLOAT) -> None:
        self.outputs.append(helper.make_tensor_value_info(tensor, kind, [None] * rank))

    def constant(self, values: Any, kind: Any = np.float32) -> str:
        """As an initialiser, or as a Constant node in one of its spellings; sometimes behind an Identity."""
        array, name = np.asarray(values, kind), self.name()
        how = self.random.random()
        if how < 0.6:
            self.root.initializers.append(numpy_helper.from_array(array, name))
        elif (
            how < 0.8
            or self.opset < 12
            or array.ndim > 1
            or not array.size
            or array.dtype not in (np.float32, np.int64)
        ):
            self._node("Constant", [], [name], value=numpy_helper.from_array(array, ""))
        else:
            stem = "value_float" if array.dtype == np.float32 else "value_int"
            self._node("Constant", [], [name], **{stem + "s" * array.ndim: array.tolist()})
        return self.op("Identity", name) if self.chance(0.03) else name

    def ints(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def normal(self, *shape: int, scale: float = 1.0) -> str:
        return self.constant(self.root.weights.standard_normal(shape) * scale)

    def uniform(self, *shape: int) -> str:
        return self.constant(self.root.weights.uniform(0.5, 1.5, shape))

    def op(self, op: str, *inputs: str, **attrs: Any) -> str:
        return self.ops(op, *inputs, count=1, **attrs)[0]

    def ops(self, op: str, *inputs: str, count: int, **attrs: Any) -> list[str]:
        """A node, now and then twice, so that there is a duplicate to merge."""
        made = [self.name() for _ in range(count)]
        self._node(op, list(inputs), made, **attrs)
        if self.chance(0.04) and op not in ("If", "Loop"):
            twin = [self.name() for _ in range(count)]
            self._node(op, list(inputs), twin, **attrs)
            return twin if self.chance(0.5) else made
        return made

    def _node(self, op: str, inputs: list[str], outputs: list[str], **attrs: Any) -> None:
        label = f"/{op}_{outputs[0]}" if self.root.named else ""
        self.nodes.append(helper.make_node(op, inputs, outputs, name=label, **attrs))

    # operators whose spelling depends on the opset

    def either(self, op: str, a: str, b: str) -> str:
        """A commutative operator with its operands in either order."""
        return self.op(op, a, b) if self.chance(0.5) else self.op(op, b, a)

    def with_axes(self, op: str, x: str, axes: Sequence[int], **attrs: Any) -> str:
        """Squeeze, Unsqueeze or a reduction."""
        since = 13 if op in ("Squeeze", "Unsqueeze", "ReduceSum") else 18
        if self.opset < since:
            return self.op(op, x, axes=list(axes), **attrs)
        return self.op(op, x, self.ints(*axes), **attrs)

    def slice(self, x: str, start: int, end: int, axis: int, step: int = 1) -> str:
        parts = [self.ints(start), self.ints(end), self.ints(axis)]
        return self.op("Slice", x, *parts, *([self.ints(step)] if step != 1 or self.chance(0.5) else []))

    def split(self, x: str, sizes: Sequence[int], axis: int) -> list[str]:
        if self.opset < 13:
            return self.ops("Split", x, count=len(sizes), axis=axis, split=list(sizes))
        if self.opset >= 18 and len(set(sizes)) == 1 and self.chance(0.5):
            return self.ops("Split", x, count=len(sizes), axis=axis, num_outputs=len(sizes))
        return self.ops("Split", x, self.ints(*sizes), count=len(sizes), axis=axis)

    def clip(self, x: str, low: float | None, high: float | None) -> str:
        bounds = ["" if bound is None else self.constant(bound) for bound in (low, high)]
        return self.op("Clip", x, *(bounds if bounds[1] else bounds[:1]))

    def cast(self, x: str, to: int) -> str:
        return self.op("Cast", x, to=to)

    def size(self, x: str, axis: int) -> str:
        """One dimension of x, as int64 [1]."""
        if self.opset >= 15 and self.chance(0.3):
            return self.op("Shape", x, start=axis, end=axis + 1)
        shape = self.op("Shape", x)
        if self.chance(0.3):
            return self.slice(shape, axis, axis + 1, 0)
        if self.chance(0.5):
            return self.op("Gather", shape, self.ints(axis), axis=0)
        return self.with_axes("Unsqueeze", self.op("Gather", shape, self.constant(axis, np.int64), axis=0), [0])

    def reshape(self, x: str, *target: int | str) -> str:
        """`target` holds numbers and int64 [1] tensors."""
        if not any(isinstance(size, str) for size in target):
            return self.op("Reshape", x, self.ints(*target))  # type: ignore[arg-type]
        parts = [size if isinstance(size, str) else self.ints(size) for size in target]
        return self.op("Reshape", x, self.op("Concat", *parts, axis=0))

    # spellings of nothing and of functions

    def maybe_nothing(self, x: str, rank: int) -> str:
        """x, sometimes behind nodes that leave a float tensor as it is."""
        if not self.chance(0.15):
            return x
        how = self.random.randrange(9)
        if how == 0:
            return self.op("Identity", x)
        if how == 1:
            return self.op("Dropout", x)
        if how == 2:
            return self.cast(x, TensorProto.FLOAT)
        if how == 3:
            return self.either("Mul", x, self.constant([1.0] * self.pick(0, 1) or 1.0))
        if how == 4:
            return self.op("Reshape", x, self.op("Shape", x))
        if how == 5:
            return self.op("Transpose", x, perm=list(range(rank)))
        if how == 6:
            axis = self.random.randrange(rank + 1)
            return self.with_axes("Squeeze", self.with_axes("Unsqueeze", x, [axis]), [axis])
        if how == 7:
            return self.op("Neg", self.op("Neg", x))
        return self.cast(self.cast(x, TensorProto.DOUBLE), TensorProto.FLOAT)

    def activation(self, x: str) -> str:
        """A function of each element, in one of its spellings."""
        make = [
            lambda: self.op("Relu", x),
            lambda: self.op("Relu", self.op("Relu", x)),
            lambda: self.clip(x, 0, 6),
            lambda: self.clip(x, -1, None),
            lambda: self.op("Tanh", x),
            lambda: self.op("LeakyRelu", x, alpha=0.1),
            lambda: self.either("Mul", x, self.op("HardSigmoid", x, alpha=1 / 6)),
            lambda: self.either("Mul", x, self.op("Sigmoid", x)),
            lambda: self.either("Mul", x, self.op("Sigmoid", self.either("Mul", x, self.constant(1.702)))),
            lambda: self.op(
                "Div", self.either("Mul", x, self.clip(self.either("Add", x, self.constant(3)), 0, 6)), self.constant(6)
            ),
            lambda: self.op(
                "Div", x, self.either("Add", self.op("Exp", self.op("Neg", x)), self.constant(self.pick(1, [1])))
            ),
            lambda: self.gelu(x),
            lambda: self.tanh_gelu(x),
        ]
        if self.opset >= 14:
            make.append(lambda: self.op("HardSwish", x))
        if self.opset >= 20:
            make.append(lambda: self.op("Gelu", x, approximate=self.pick("none", "tanh")))
        return make[self.random.randrange(len(make))]()

    def gelu(self, x: str) -> str:
        inner = self.op("Div", x, self.constant(2**0.5)) if self.chance(0.5) else None
        inner = inner or self.either("Mul", x, self.constant(0.5**0.5))
        one = self.either("Add", self.op("Erf", inner), self.constant(1))
        if self.chance(0.5):
            return self.either("Mul", self.either("Mul", x, one), self.constant(0.5))
        return self.either("Mul", self.either("Mul", x, self.constant(0.5)), one)

    def tanh_gelu(self, x: str) -> str:
        cube = self.op("Pow", x, self.constant(3)) if self.chance(0.5) else None
        cube = cube or self.either("Mul", x, self.either("Mul", x, x))
        inner = self.either("Add", x, self.either("Mul", cube, self.constant(0.044715)))
        one = self.either(
            "Add", self.op("Tanh", self.either("Mul", inner, self.constant((2 / np.pi) ** 0.5))), self.constant(1)
        )
        return self.either("Mul", self.either("Mul", x, self.constant(0.5)), one)

    def graph(self, name: str = "random") -> onnx.GraphProto:
        return helper.make_graph(self.nodes, name, self.inputs, self.outputs, self.initializers)

    def drawn(self) -> Drawn:
        ir_version = 7 if self.opset < 17 else 8 if self.opset < 21 else 10
        opsets = [helper.make_opsetid("", self.opset)]
        model = helper.make_model(self.graph(), opset_imports=opsets, ir_version=ir_version)
        return Drawn(model, tuple(self.feeds))
