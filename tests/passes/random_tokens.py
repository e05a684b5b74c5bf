"""Random transformers on tokens [batch, seq], in the spellings of exporters."""

from random import Random

import numpy as np
from onnx import TensorProto

from tests.passes.random_graphs import OPSETS, Drawn, Net

POSITIONS = 16
"""Rows of tables, more than any sequence has."""
_VOCABULARY = 11


class _Tokens:
    """What the layers of one network share."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.batch, self.seq = net.pick(((2, 1), (5, 7)), ((2, 3), (4, 1)), ((1, 1), (3, 6)), ((2, 2), (4, 4)))
        self.heads, self.head = net.pick(1, 2, 4), net.pick(2, 4)
        self.hidden = net.pick(self.heads * self.head, 6)
        self.symbolic = ((self.batch, "batch"), (self.seq, "seq"))
        if len({*self.batch, *self.seq}) == 2 and self.batch[0] == self.batch[1]:
            self.symbolic = (self.batch, self.seq)
        self.rms, self.rotary, self.masked = net.chance(0.4), net.chance(0.5), net.chance(0.5)
        self.shape_once = net.chance(0.5)
        self.leader = ""  # a tensor [batch, seq, ..] whose sizes Reshapes ask for
        self.tables: tuple[str, str] | None = None
        self.mask: str | None = None
        self.style = net.random.randrange(4)  # of norms and rotations: one exporter has one

    def sizes(self, x: str) -> tuple[str, str]:
        tensor = self.leader if self.shape_once else x
        return self.net.size(tensor, 0), self.net.size(tensor, 1)


def token_network(random: Random) -> Drawn:
    """Ids or vectors through an embedding and one or two layers to logits or vectors."""
    net = Net(random, random.choice(OPSETS))
    t = _Tokens(net)
    x = _embedded(t)
    t.leader = x
    if t.rotary and t.head > 1:
        t.tables = _tables(t)
    if t.masked:
        t.mask = _mask(t)
    for _ in range(random.randint(1, 2)):
        x = _layer(t, x)
    if net.chance(0.7):
        x = _norm(t, x, t.hidden)
    if net.chance(0.4):  # the last token's
        index = net.constant(-1, np.int64)
        x, rank = net.op("Gather", x, index, axis=1), 2
        if net.chance(0.5):
            x = net.slice(x, 0, 2**31, 0)
    else:
        rank = 3
    if net.chance(0.6):
        x = _linear(net, x, t.hidden, _VOCABULARY, net.chance(0.3), rank)
    net.output(x, rank)
    return net.drawn()


def _embedded(t: _Tokens) -> str:
    net, weights = t.net, t.net.weights
    if net.chance(0.3):
        x = net.input("x", [*t.symbolic, (t.hidden,) * 2])
    else:
        kind = net.pick(np.int64, np.int64, np.int32)
        ids = net.input("ids", t.symbolic, lambda shape: weights.integers(0, _VOCABULARY, shape).astype(kind))
        x = net.op("Gather", net.normal(_VOCABULARY, t.hidden), ids, axis=0)
    how = net.random.randrange(4)
    table = weights.standard_normal((POSITIONS, t.hidden)).astype(np.float32)
    if how == 0:
        rows = net.op("Gather", net.constant(table), _positions(t, x), axis=0)
        x = net.either("Add", x, rows)
    elif how == 1:
        rows = net.op("Slice", net.constant(table[None]), net.ints(0), net.size(x, 1), net.ints(1))
        x = net.either("Add", x, rows)
    elif how == 2:
        ids = net.op("Slice", net.constant([range(POSITIONS)], np.int64), net.ints(0), net.size(x, 1), net.ints(1))
        x = net.either("Add", x, net.op("Gather", net.constant(table), ids))
    return _norm(t, x, t.hidden) if net.chance(0.3) else x


def _positions(t: _Tokens, x: str) -> str:
    """Position ids [batch, seq], [1, seq] or [seq], given or counted."""
    net, weights = t.net, t.net.weights
    how = net.random.randrange(4)
    if how < 2 and all(value.name != "position_ids" for value in net.inputs):
        shape = [(1, 1), t.symbolic[1]] if how == 0 else t.symbolic
        return net.input("position_ids", shape, lambda sizes: weights.integers(0, POSITIONS, sizes).astype(np.int64))
    length = net.with_axes("Squeeze", net.size(x, 1), [0])
    counted = net.op("Range", net.constant(0, np.int64), length, net.constant(1, np.int64))
    if how == 2:
        return net.with_axes("Unsqueeze", counted, [0])
    shape = (
        net.op("Concat", *t.sizes(x), axis=0) if t.leader else net.op("Concat", net.size(x, 0), net.size(x, 1), axis=0)
    )
    return net.op("Expand", net.with_axes("Unsqueeze", counted, [0]), shape)


def _norm(t: _Tokens, x: str, size: int) -> str:
    net = t.net
    epsilon = net.constant(net.pick(1e-5, 1e-6, 1e-12)) if not t.rms else net.constant(net.pick(1e-5, 1e-6))
    gamma = net.uniform(size) if net.chance(0.8) else None
    if not t.rms and net.opset >= 17 and t.style == 0:
        return net.op("LayerNormalization", x, gamma or net.uniform(size), net.normal(size), axis=-1, epsilon=1e-5)
    if t.rms and net.opset >= 23 and t.style == 0:
        return net.op("RMSNormalization", x, gamma or net.uniform(size), axis=-1, epsilon=1e-5)
    value = x if t.rms else net.op("Sub", x, net.with_axes("ReduceMean", x, [-1], keepdims=1))
    square = net.op("Mul", value, value) if net.chance(0.5) else net.op("Pow", value, net.constant(2))
    variance = net.either("Add", net.with_axes("ReduceMean", square, [-1], keepdims=1), epsilon)
    root = net.op("Sqrt", variance)
    how = t.style if net.chance(0.7) else net.random.randrange(4)
    if how == 0:
        core = net.op("Div", value, root)
    elif how == 1:
        core = net.either("Mul", value, net.op("Reciprocal", root))
    elif how == 2:
        core = net.either("Mul", value, net.op("Div", net.constant(1), root))
    else:
        core = net.either("Mul", value, net.op("Pow", variance, net.constant(-0.5)))
    if gamma:
        core = net.either("Mul", core, gamma)
    return net.either("Add", core, net.normal(size, scale=0.3)) if not t.rms and net.chance(0.8) else core


def _linear(net: Net, x: str, inner: int, outer: int, bias: bool, rank: int = 3) -> str:
    weight = net.normal(inner, outer, scale=inner**-0.5)
    if net.chance(0.2):
        weight = net.op("Transpose", net.normal(outer, inner, scale=inner**-0.5), perm=[1, 0])
    y = net.op("MatMul", x, weight)
    if bias:
        y = net.either("Add", y, net.normal(outer, scale=0.3))
    return net.either("Mul", y, net.uniform(outer)) if net.chance(0.05) else net.maybe_nothing(y, rank)


def _layer(t: _Tokens, x: str) -> str:
    net, before = t.net, t.net.chance(0.7)
    y = _attention(t, _norm(t, x, t.hidden) if before else x)
    x = net.either("Add", x, y)
    if not before:
        x = _norm(t, x, t.hidden)
    y = _feed_forward(t, _norm(t, x, t.hidden) if before else x)
    x = net.either("Add", x, y)
    return x if before else _norm(t, x, t.hidden)


def _feed_forward(t: _Tokens, x: str) -> str:
    net, inner, bias = t.net, t.net.pick(4, 8), t.net.chance(0.5)
    if net.chance(0.5):
        gate, up = _linear(net, x, t.hidden, inner, bias), _linear(net, x, t.hidden, inner, bias)
        gate = net.either("Mul", gate, net.op("Sigmoid", gate)) if net.chance(0.6) else net.activation(gate)
        middle = net.either("Mul", gate, up)
    else:
        middle = _linear(net, x, t.hidden, inner, bias)
        middle = (
            net.gelu(middle)
            if net.chance(0.5)
            else net.tanh_gelu(middle)
            if net.chance(0.5)
            else net.activation(middle)
        )
    return _linear(net, middle, inner, t.hidden, bias)


def _heads(t: _Tokens, x: str, y: str) -> str:
    """y [batch, seq, heads * head] as [batch, seq, heads, head]."""
    net = t.net
    if net.chance(0.3):
        return net.reshape(y, 0, net.pick(0, -1), t.heads, t.head)
    batch, seq = t.sizes(x)
    return net.reshape(y, batch, net.pick(seq, -1), t.heads, t.head)


def _attention(t: _Tokens, x: str) -> str:
    net, width, bias = t.net, t.heads * t.head, t.net.chance(0.5)
    if net.chance(0.2):
        q, k, v = net.split(_linear(net, x, t.hidden, 3 * width, bias), [width] * 3, -1)
    else:
        q, k, v = (_linear(net, x, t.hidden, width, bias) for _ in range(3))
    q, k, v = (net.op("Transpose", _heads(t, x, y), perm=[0, 2, 1, 3]) for y in (q, k, v))
    if t.tables:
        q, k = _rotated(t, q), _rotated(t, k)
    how = net.random.randrange(4)
    scale = t.head**-0.5
    if how == 0:
        q = net.either("Mul", q, net.constant(scale))
    elif how == 1:
        q, k = (net.either("Mul", y, net.constant(scale**0.5)) for y in (q, k))
    scores = net.op("MatMul", q, net.op("Transpose", k, perm=[0, 1, 3, 2]))
    if how == 2:
        scores = net.op("Div", scores, net.constant(net.pick(t.head**0.5, [t.head**0.5])))
    if t.mask:
        scores = net.either("Add", scores, t.mask)
    probabilities = net.op("Softmax", scores, axis=-1 if net.opset < 13 else net.pick(-1, 3))
    probabilities = net.op("Dropout", probabilities) if net.chance(0.1) else probabilities
    y = net.op("Transpose", net.op("MatMul", probabilities, v), perm=[0, 2, 1, 3])
    if net.chance(0.5):
        y = net.reshape(y, 0, 0, width)
    else:
        batch, seq = t.sizes(x)
        y = net.reshape(y, batch, net.pick(seq, -1), width)
    return _linear(net, y, width, t.hidden, bias)


def _mask(t: _Tokens) -> str:
    """An additive mask that broadcasts to [batch, heads, seq, seq] and leaves every query a key."""
    net, weights = t.net, t.net.weights
    if net.chance(0.5):  # of padding

        def padding(shape: tuple[int, ...]) -> np.ndarray:
            return (weights.random(shape) < 0.7) | (np.arange(shape[1]) == 0)

        kind = net.pick(np.int64, np.float32, np.bool_)
        mask = net.input("mask", t.symbolic, lambda shape: padding(shape).astype(kind))
        if kind is np.bool_ or net.chance(0.3):
            mask = mask if kind is np.bool_ else net.cast(mask, TensorProto.BOOL)
            wide = net.with_axes("Unsqueeze", mask, [1, 2])
            return net.op("Where", wide, net.constant(0.0), net.constant(-1e9))
        if kind is np.int64:
            mask = net.cast(mask, TensorProto.FLOAT)
        wide = net.with_axes("Unsqueeze", net.with_axes("Unsqueeze", mask, [1]), [2])
        return net.either("Mul", net.op("Sub", net.constant(1.0), wide), net.constant(-10000.0))
    _, seq = t.sizes(t.leader)  # causal
    how = net.random.randrange(3)
    if how == 0:
        full = np.triu(np.full((POSITIONS, POSITIONS), -1e9, np.float32), 1)[None, None]
        return net.op("Slice", net.constant(full), net.ints(0, 0), net.op("Concat", seq, seq, axis=0), net.ints(2, 3))
    length = net.with_axes("Squeeze", seq, [0])
    line = net.op("Range", net.constant(0, np.int64), length, net.constant(1, np.int64))
    row, column = net.with_axes("Unsqueeze", line, [0]), net.with_axes("Unsqueeze", line, [1])
    if how == 1 or net.opset < 14:
        return net.op("Where", net.op("Greater", row, column), net.constant(-1e9), net.constant(0.0))
    ones = net.op("ConstantOfShape", net.op("Concat", seq, seq, axis=0))
    filled = net.op("Add", ones, net.constant(-1e9))
    return net.op("Trilu", filled, net.constant(1, np.int64), upper=1)


def _tables(t: _Tokens) -> tuple[str, str]:
    """Cosines and sines [batch or 1, 1, seq, head], from frequencies or looked up."""
    net, half = t.net, t.head // 2
    positions = _positions(t, t.leader)
    inverse = 100.0 ** -(np.arange(half) / max(half, 1))
    if net.chance(0.3):
        angles = np.outer(np.arange(POSITIONS), np.concatenate([inverse, inverse]))
        rows = [net.op("Gather", net.constant(f(angles)), positions, axis=0) for f in (np.cos, np.sin)]
    else:
        column = net.with_axes("Unsqueeze", net.cast(positions, TensorProto.FLOAT), [2])
        if net.chance(0.3):
            steps = net.op("Range", net.constant(0.0), net.constant(float(half)), net.constant(1.0))
            power = net.op("Pow", net.constant(100.0), net.op("Div", steps, net.constant(float(half))))
            frequencies = net.reshape(net.op("Reciprocal", power), 1, 1, half)
        else:
            frequencies = net.constant(inverse.reshape(1, 1, half))
        angles = net.op("MatMul", column, frequencies) if net.chance(0.5) else net.either("Mul", column, frequencies)
        both = net.op("Concat", angles, angles, axis=-1)
        rows = [net.op(op, both) for op in ("Cos", "Sin")]
        if net.chance(0.2):
            rows = [net.either("Mul", row, net.constant(1.1)) for row in rows]
    cos, sin = (net.with_axes("Unsqueeze", row, [1]) for row in rows)
    return cos, sin


def _rotated(t: _Tokens, x: str) -> str:
    net, half = t.net, t.head // 2
    cos, sin = t.tables or ("", "")
    if t.style < 2:
        x1, x2 = net.split(x, [half, half], net.pick(-1, 3))
    else:
        x1, x2 = net.slice(x, 0, half, 3), net.slice(x, half, net.pick(t.head, 2**63 - 1), 3)
    turned = net.op("Concat", net.op("Neg", x2), x1, axis=-1)
    return net.either("Add", net.either("Mul", x, cos), net.either("Mul", turned, sin))
