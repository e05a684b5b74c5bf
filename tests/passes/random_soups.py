"""Random arithmetic, moves of axes and shapes, and control flow: no network, but what passes must survive."""

from dataclasses import dataclass
from random import Random

import numpy as np
from onnx import TensorProto, helper

from tests.passes.random_graphs import OPSETS, Dim, Drawn, Net

_INT = TensorProto.INT64


@dataclass(frozen=True)
class Value:
    """A tensor, float32 or int64."""

    name: str
    dims: tuple[Dim, ...]
    kind: int = TensorProto.FLOAT

    @property
    def rank(self) -> int:
        return len(self.dims)

    def fixed(self, axis: int) -> int | None:
        """Its size, if it is one in all runs."""
        return self.dims[axis][0] if len(set(self.dims[axis])) == 1 else None


def soup(random: Random) -> Drawn:
    """Two float inputs, integers, sometimes a flag and a trip count; all values left over may be outputs."""
    net = Net(random, random.choice(OPSETS))
    first: Dim = (3, 2) if net.chance(0.5) else (2, 2)
    dims = (first, (2, 2), (3, 3), (4, 4))[: net.pick(2, 3, 4, 4)]
    named = [(first, "n"), *dims[1:]] if net.chance(0.7) or first == (3, 2) else dims
    values = [Value(net.input(name, named), dims) for name in ("x", "z")]
    numbers = net.input("k", named[:2], lambda shape: net.root.weights.integers(-3, 4, shape))
    values.append(Value(numbers, dims[:2], _INT))
    kitchen = _Kitchen(net, values, depth=0)
    kitchen.cook(random.randint(3, 20))
    made = values[3:]
    for value in {value.name: value for value in (made[-1], *random.sample(made, min(2, len(made))))}.values():
        net.output(value.name, value.rank, value.kind)
    return net.drawn()


class _Kitchen:
    """Adds random nodes to a graph; `values` are what they may read."""

    def __init__(self, net: Net, values: list[Value], depth: int) -> None:
        self.net, self.values, self.depth = net, values, depth

    def cook(self, count: int) -> None:
        steps = [self.unary, self.binary, self.binary, self.scalar, self.transpose, self.transpose, self.reshape]
        steps += [self.unsqueeze, self.squeeze, self.slice, self.concat, self.split, self.pad, self.expand]
        steps += [self.where, self.reduce, self.reduce, self.gather, self.softmax, self.casts, self.sizes, self.matmul]
        steps += [self.constants, self.branches, self.loop]
        while count > 0:
            made = steps[self.net.random.randrange(len(steps))]()
            if made:
                self.values.append(made)
                count -= 1

    # what to read

    def value(self, floats: bool = False) -> Value:
        """Any value; late ones more often."""
        found = [value for value in self.values if not floats or value.kind != _INT]
        return found[-1 - min(self.net.random.randrange(len(found)), self.net.random.randrange(len(found)))]

    def axis(self, x: Value) -> int:
        return self.net.random.randrange(x.rank)

    def either_way(self, x: Value, axis: int) -> int:
        """The axis, sometimes counted from the end."""
        return axis - x.rank * self.net.pick(0, 1)

    def constant(self, x: Value, *dims: int) -> str:
        if x.kind == _INT:
            return self.net.constant(self.net.root.weights.integers(-2, 3, dims), np.int64)
        return self.net.uniform(*dims)

    # elements

    def unary(self) -> Value | None:
        x = self.value()
        if x.kind == _INT:
            return Value(self.net.op(self.net.pick("Neg", "Abs", "Identity"), x.name), x.dims, _INT)
        ops = ("Neg", "Abs", "Tanh", "Sigmoid", "Relu", "Identity", "Softplus")
        name = self.net.activation(x.name) if self.net.chance(0.3) else self.net.op(self.net.pick(*ops), x.name)
        return Value(self.net.maybe_nothing(name, x.rank), x.dims)

    def binary(self) -> Value | None:
        x = self.value()
        same = [value for value in self.values if value.dims == x.dims and value.kind == x.kind]
        ops = ("Add", "Sub") if x.kind == _INT else ("Add", "Sub", "Mul", "Max", "Min")
        y = self.net.random.choice(same)
        name = self.net.op(self.net.pick(*ops), x.name, y.name)
        return Value(self.net.op("Tanh", name) if x.kind != _INT and self.net.chance(0.4) else name, x.dims, x.kind)

    def scalar(self) -> Value | None:
        """Arithmetic with a constant that broadcasts."""
        x = self.value()
        tail = [
            x.fixed(axis) if self.net.chance(0.6) else 1 for axis in range(self.net.random.randint(0, x.rank), x.rank)
        ]
        if self.net.chance(0.1) and x.rank < 5:
            tail = [1] * (x.rank + 1)
        constant = self.constant(x, *(size or 1 for size in tail))
        neutral = self.net.pick(0.0, -0.0, 1.0) if self.net.chance(0.3) else None
        if neutral is not None:
            tail = []
            constant = self.net.constant(neutral, np.int64 if x.kind == _INT else np.float32)
        ops = ("Add", "Sub", "Mul", "Div") if x.kind != _INT and neutral is None else ("Add", "Sub", "Mul")
        op = self.net.pick(*ops)
        flip = self.net.chance(0.4) and op != "Div"
        name = self.net.op(op, *((constant, x.name) if flip else (x.name, constant)))
        return Value(name, ((1,) * self.net.runs,) * max(0, len(tail) - x.rank) + x.dims, x.kind)

    def where(self) -> Value | None:
        x = self.value()
        numbers = [value for value in self.values if value.kind == _INT and value.dims == x.dims]
        others = [value for value in self.values if value.dims == x.dims and value.kind == x.kind]
        net, y = self.net, self.net.random.choice(others).name
        if numbers and net.chance(0.7):
            number = net.random.choice(numbers).name
            condition = net.op(net.pick("Greater", "Equal", "Less"), number, net.constant(0, np.int64))
            condition = net.op("Not", net.op("Not", condition)) if net.chance(0.2) else condition
        else:
            condition = net.constant(net.chance(0.5), np.bool_)
        return Value(net.op("Where", condition, x.name, y), x.dims, x.kind)

    def casts(self) -> Value | None:
        x = self.value()
        if x.kind == _INT:
            return Value(self.net.cast(x.name, TensorProto.FLOAT), x.dims)
        wide = self.net.cast(x.name, TensorProto.DOUBLE)
        return Value(self.net.cast(self.net.op("Neg", wide) if self.net.chance(0.5) else wide, 1), x.dims)

    def softmax(self) -> Value | None:
        x = self.value(floats=True)
        if not x.rank:
            return None
        axis = x.rank - 1 if self.net.opset < 13 else self.axis(x)
        return Value(self.net.op("Softmax", x.name, axis=self.either_way(x, axis)), x.dims)

    def constants(self) -> Value | None:
        """What can be folded, met by what cannot."""
        x, net = self.value(floats=True), self.net
        shape = [x.fixed(axis) or 1 for axis in range(x.rank)]
        folded = net.op(net.pick("Add", "Mul"), net.uniform(*shape), net.uniform(*shape))
        if net.chance(0.4):
            folded = net.op("Transpose", net.op("Transpose", folded))
        return Value(net.either("Mul", x.name, folded), x.dims)

    def matmul(self) -> Value | None:
        x = self.value(floats=True)
        size = x.fixed(-1) if x.rank > 1 else None
        if not size:
            return None
        width = self.net.pick(2, 3)
        name = self.net.op("MatMul", x.name, self.net.normal(size, width, scale=size**-0.5))
        if self.net.chance(0.5):
            name = self.net.either("Add", name, self.net.normal(width))
        return Value(name, (*x.dims[:-1], (width,) * self.net.runs))

    # places

    def transpose(self) -> Value | None:
        x = self.value()
        common = {2: [[1, 0]], 3: [[0, 2, 1], [1, 0, 2]], 4: [[0, 2, 3, 1], [0, 3, 1, 2], [0, 2, 3, 1], [0, 2, 1, 3]]}
        if not x.rank:
            return None
        order = list(range(x.rank))
        if x.rank in common and self.net.chance(0.9):
            order = self.net.random.choice(common[x.rank])
        else:
            self.net.random.shuffle(order)
        return Value(self.net.op("Transpose", x.name, perm=order), tuple(x.dims[axis] for axis in order), x.kind)

    def reshape(self) -> Value | None:
        """Two neighbours merged, or one split, sizes spelled as numbers, 0, -1 or read from the tensor."""
        x, net = self.value(), self.net
        if not x.rank:
            return None
        axis = self.axis(x)
        size = x.fixed(axis)
        if net.chance(0.5) and size and size % 2 == 0 and x.rank < 5:
            parts: list[Dim] = [(2,) * net.runs, (size // 2,) * net.runs]
            made = (*x.dims[:axis], *parts, *x.dims[axis + 1 :])
        elif axis + 1 < x.rank:
            merged = tuple(a * b for a, b in zip(x.dims[axis], x.dims[axis + 1], strict=True))
            made = (*x.dims[:axis], merged, *x.dims[axis + 2 :])
        else:
            made = x.dims
        target: list[int | str] = []
        free = net.chance(0.5)
        for place, dim in enumerate(made):
            known = dim[0] if len(set(dim)) == 1 else None
            if place < x.rank and x.dims[place] == dim and net.chance(0.3):
                target.append(0)
            elif free and net.chance(0.4):
                target.append(-1)
                free = False
            elif known is not None:
                target.append(known)
            elif place < x.rank and x.dims[place] == dim:
                target.append(net.size(x.name, place))
            elif -1 not in target:
                target.append(-1)
                free = False
            else:
                return None
        return Value(net.reshape(x.name, *target) if target else x.name, made, x.kind)

    def unsqueeze(self) -> Value | None:
        x = self.value()
        if x.rank > 4:
            return None
        axis = self.net.random.randint(0, x.rank)
        spelled = axis - self.net.pick(0, 1) * (x.rank + 1)
        name = self.net.with_axes("Unsqueeze", x.name, [spelled])
        return Value(name, (*x.dims[:axis], (1,) * self.net.runs, *x.dims[axis:]), x.kind)

    def squeeze(self) -> Value | None:
        x = self.value()
        ones = [axis for axis in range(x.rank) if x.fixed(axis) == 1]
        if not ones:
            return None
        axis = self.net.random.choice(ones)
        name = self.net.with_axes("Squeeze", x.name, [self.either_way(x, axis)])
        return Value(name, (*x.dims[:axis], *x.dims[axis + 1 :]), x.kind)

    def slice(self) -> Value | None:
        x, net = self.value(), self.net
        if not x.rank:
            return None
        axis = self.axis(x)
        start, end, step = net.pick(
            (0, 2**31, 1), (0, 2**63 - 1, 1), (0, 1, 1), (-1, 2**31, 1), (0, 2**31, 2), (-1, -(2**31), -1)
        )
        sizes = tuple(len(range(size)[start:end:step]) for size in x.dims[axis])
        name = net.slice(x.name, start, end, self.either_way(x, axis), step)
        return Value(name, (*x.dims[:axis], sizes, *x.dims[axis + 1 :]), x.kind)

    def concat(self) -> Value | None:
        x, net = self.value(), self.net
        if not x.rank or max(max(dim) for dim in x.dims) > 8:
            return None
        axis = self.axis(x)

        def fits(y: Value) -> bool:
            return (
                y.kind == x.kind
                and y.rank == x.rank
                and all(a == b or i == axis for i, (a, b) in enumerate(zip(x.dims, y.dims, strict=True)))
            )

        y = net.random.choice([value for value in self.values if fits(value)])
        parts = [x, y] if net.chance(0.9) else [x]
        sizes = tuple(sum(part.dims[axis][run] for part in parts) for run in range(net.runs))
        name = net.op("Concat", *(part.name for part in parts), axis=self.either_way(x, axis))
        return Value(name, (*x.dims[:axis], sizes, *x.dims[axis + 1 :]), x.kind)

    def split(self) -> Value | None:
        x, net = self.value(), self.net
        axes = [axis for axis in range(x.rank) if (x.fixed(axis) or 0) > 1]
        if not axes:
            return None
        axis = net.random.choice(axes)
        size = x.fixed(axis) or 0
        first = net.random.randint(1, size - 1)
        names = net.split(x.name, [first, size - first], self.either_way(x, axis))
        made = [
            Value(name, (*x.dims[:axis], (part,) * net.runs, *x.dims[axis + 1 :]), x.kind)
            for name, part in zip(names, (first, size - first), strict=True)
        ]
        self.values.append(made[0])
        return made[1]

    def pad(self) -> Value | None:
        x, net = self.value(floats=True), self.net
        if not x.rank:
            return None
        pads = [net.pick(0, 0, 1) for _ in range(2 * x.rank)]
        name = net.op("Pad", x.name, net.ints(*pads), *([net.constant(0.5)] if net.chance(0.5) else []))
        return Value(name, tuple(tuple(v + pads[i] + pads[i + x.rank] for v in d) for i, d in enumerate(x.dims)))

    def expand(self) -> Value | None:
        x, net = self.value(), self.net
        if max((max(dim) for dim in x.dims), default=0) > 8 or x.rank > 4:
            return None
        shape = [net.pick(1, 2) if x.fixed(axis) == 1 else 1 for axis in range(x.rank)]
        dims = tuple((shape[i],) * net.runs if shape[i] != 1 else dim for i, dim in enumerate(x.dims))
        if net.chance(0.3):
            return Value(net.op("Expand", x.name, net.ints(2, *shape)), ((2,) * net.runs, *dims), x.kind)
        if net.chance(0.3) and dims == x.dims:
            return Value(net.op("Expand", x.name, net.op("Shape", x.name)), dims, x.kind)
        return Value(net.op("Expand", x.name, net.ints(*shape)), dims, x.kind)

    def reduce(self) -> Value | None:
        x, net = self.value(), self.net
        if not x.rank or any(0 in dim for dim in x.dims):
            return None
        axes = sorted(net.random.sample(range(x.rank), net.random.randint(1, min(2, x.rank))))
        keep = net.pick(0, 1)
        ops = ("ReduceSum", "ReduceMax") if x.kind == _INT else ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin")
        name = net.with_axes(net.pick(*ops), x.name, [self.either_way(x, axis) for axis in axes], keepdims=keep)
        one = (1,) * net.runs
        dims = tuple(one if i in axes else dim for i, dim in enumerate(x.dims) if keep or i not in axes)
        return Value(name, dims, x.kind)

    def gather(self) -> Value | None:
        x, net = self.value(), self.net
        if not x.rank or any(0 in dim for dim in x.dims):
            return None
        axis = self.axis(x)
        indices = [0, -1, 0][: net.pick(1, 2, 3)] if net.chance(0.5) else net.pick(0, -1)
        index, extra = (
            net.constant(indices, np.int64),
            ((len(indices),) * net.runs,) if isinstance(indices, list) else (),
        )
        name = net.op("Gather", x.name, index, axis=self.either_way(x, axis))
        return Value(name, (*x.dims[:axis], *extra, *x.dims[axis + 1 :]), x.kind)

    def sizes(self) -> Value | None:
        """Shape arithmetic whose results are values."""
        x, net = self.value(), self.net
        if not x.rank:
            return None
        size = net.size(x.name, self.axis(x))
        for _ in range(net.random.randint(0, 2)):
            size = net.op(net.pick("Mul", "Add", "Div"), size, net.ints(2))
        return Value(net.op("Concat", size, net.ints(3), axis=0), ((2,) * net.runs,), _INT)

    # control flow

    def branches(self) -> Value | None:
        """An If whose branches give the same shape; inside one another at most once."""
        net, x = self.net, self.value()
        if self.depth > 1:
            return None
        how = net.random.randrange(3)
        if how == 0:
            condition = net.constant(net.chance(0.5), np.bool_)
        elif how == 1:
            condition = self._flag()
        else:
            size = net.with_axes("ReduceSum", net.op("Shape", x.name), [0], keepdims=0)
            condition = net.op("Greater", size, net.constant(net.pick(0, 5, 8), np.int64))
        graphs = []
        for label in ("then_branch", "else_branch"):
            inner = net.branch()
            made = self._body(inner, x)
            inner.output(made, x.rank, x.kind)
            graphs.append(inner.graph(f"{label}_{net.name()}"))
        name = net.op("If", condition, then_branch=graphs[0], else_branch=graphs[1])
        return Value(name, x.dims, x.kind)

    def _flag(self) -> str:
        root = self.net.root
        if all(value.name != "flag" for value in root.inputs):
            first = self.net.chance(0.5)
            flags = iter([first, not first])
            root.input("flag", [], lambda shape: np.array(next(flags)))
        return "flag"

    def _body(self, inner: Net, x: Value) -> str:
        """A result of the shape of x, with other work on the way."""
        kitchen = _Kitchen(inner, [*self.values, x], self.depth + 1)
        kitchen.cook(inner.random.randint(0, 3))
        fitting = [value for value in kitchen.values if value.dims == x.dims and value.kind == x.kind]
        last = fitting[-1]
        if last.name in {node_output for node in inner.nodes for node_output in node.output} and inner.chance(0.7):
            return last.name
        return inner.op("Identity" if inner.chance(0.5) else "Neg", last.name)

    def loop(self) -> Value | None:
        """A Loop of few iterations that carries x and stacks what it carried."""
        net, x = self.net, self.value()
        if self.depth > 0 or net.chance(0.5):
            return None
        trips = net.pick(1, 2, 3)
        inner = net.branch()
        names = [net.name() for _ in range(3)]
        kinds = ((_INT, []), (TensorProto.BOOL, []), (x.kind, [None] * x.rank))
        inner.inputs = [
            helper.make_tensor_value_info(n, kind, shape) for n, (kind, shape) in zip(names, kinds, strict=True)
        ]
        made = self._body(inner, Value(names[2], x.dims, x.kind))
        goes_on = inner.op("Identity", names[1])
        stacked = inner.op("Identity", names[2])
        for tensor, rank, kind in ((goes_on, 0, TensorProto.BOOL), (made, x.rank, x.kind), (stacked, x.rank, x.kind)):
            inner.output(tensor, rank, kind)
        count, flag = net.constant(trips, np.int64), net.constant(True, np.bool_)
        last, rows = net.ops("Loop", count, flag, x.name, count=2, body=inner.graph(f"body_{net.name()}"))
        if net.chance(0.5):
            self.values.append(Value(rows, ((trips,) * net.runs, *x.dims), x.kind))
        return Value(last, x.dims, x.kind)
