"""Random networks on images: convolutions and what stands around them."""

from dataclasses import dataclass
from random import Random

import numpy as np

from tests.passes.random_graphs import OPSETS, Dim, Drawn, Net


@dataclass(frozen=True)
class Image:
    """A tensor [batch, channels, height, width]."""

    name: str
    channels: int
    height: Dim
    width: Dim


def image_network(random: Random) -> Drawn:
    """x [batch, channels, height, width], sizes static or not, through random blocks to a map or to classes."""
    net = Net(random, random.choice(OPSETS))
    sizes = [(8, 8), (9, 9)] if net.chance(0.6) else [(8, 11), (10, 6)]
    symbolic = net.chance(0.5)
    channels = net.pick(2, 3, 4)
    if not symbolic:
        sizes = [(size[0], size[0]) for size in sizes]
    named = [(size, name) if symbolic else size for size, name in zip(sizes, ("height", "width"), strict=True)]
    batch = ((2, 1), "batch") if net.chance(0.6) else (2, 2)
    x = Image(net.input("x", [batch, (channels,) * 2, *named]), channels, *sizes)
    if net.chance(0.15):
        x = _quantized(net, x)
    seen = [x]
    for _ in range(random.randint(1, 6)):
        x = _block(net, x, seen)
        x = Image(net.maybe_nothing(x.name, 4), x.channels, x.height, x.width)
        seen.append(x)
    if net.chance(0.6):
        _classify(net, x)
    else:
        net.output(x.name, 4)
    if net.chance(0.3) and len(seen) > 2:
        side = random.choice(seen[1:-1])
        if all(output.name != side.name for output in net.outputs):
            net.output(side.name, 4)
    return net.drawn()


def _block(net: Net, x: Image, seen: list[Image]) -> Image:
    blocks = [_conv, _conv, _conv_bn_relu, _affine, _activate, _pool, _residual, _parallel, _rep, _concat]
    blocks += [_squeeze_excite, _resize, _transposed, _channels_last, _padded, _skip]
    if min(*x.height, *x.width) < 3:
        blocks = [_affine, _activate, _squeeze_excite, _rep]
    block = blocks[net.random.randrange(len(blocks))]
    return _skip(net, x, seen) if block is _skip else block(net, x)


def _conv(net: Net, x: Image, same: bool = False, channels: int | None = None) -> Image:
    """`same` keeps height and width."""
    group = net.pick(1, 1, 2, x.channels) if channels is None and not same else net.pick(1, x.channels)
    if x.channels % group:
        group = 1
    out = channels or (x.channels if same else group * net.pick(1, 2, 3))
    if out % group:
        group = 1
    kernel = [net.pick(1, 3), net.pick(1, 3)]
    stride = 1 if same else net.pick(1, 1, 2)
    dilation = net.pick(1, 1, 2) if same else 1
    attrs: dict = {"kernel_shape": kernel} if net.chance(0.7) else {}
    pads = [0, 0, 0, 0]
    if same:
        pads = [dilation * (kernel[i] // 2) for i in (0, 1, 0, 1)]
    elif net.chance(0.6):
        pads = [net.random.randint(0, 1) for _ in range(4)]
    auto = None if dilation > 1 or not net.chance(0.2) else net.pick("SAME_UPPER", "SAME_LOWER", "VALID")
    if same and auto == "VALID":
        auto = None
    if auto:
        attrs["auto_pad"] = auto
    elif any(pads) or net.chance(0.5):
        attrs["pads"] = pads
    if stride != 1 or net.chance(0.5):
        attrs["strides"] = [stride, stride]
    if dilation != 1 or net.chance(0.2):
        attrs["dilations"] = [dilation, dilation]
    if group != 1 or net.chance(0.5):
        attrs["group"] = group
    scale = (x.channels // group * kernel[0] * kernel[1]) ** -0.5
    inputs = [net.normal(out, x.channels // group, *kernel, scale=scale)]
    if net.chance(0.5):
        inputs.append(net.normal(out, scale=0.3))
    name = net.op("Conv", x.name, *inputs, **attrs)

    def size(dim: Dim, axis: int) -> Dim:
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            return tuple(-(-value // stride) for value in dim)
        total = 0 if auto == "VALID" else pads[axis] + pads[axis + 2]
        return tuple((value + total - dilation * (kernel[axis] - 1) - 1) // stride + 1 for value in dim)

    return Image(name, out, size(x.height, 0), size(x.width, 1))


def _quantized(net: Net, x: Image) -> Image:
    """Convolutions between Q and DQ. Scales are powers of two, so that integers and floats give the same bits.

    Only for a graph's input: a value that other passes compute may round to another integer.
    """
    kind, zero = net.pick((np.uint8, 128), (np.int8, 0))

    def pair(name: str, scale: float) -> str:
        parts = [net.constant(scale), net.constant(zero, kind)]
        return net.op("DequantizeLinear", net.op("QuantizeLinear", name, *parts), *parts)

    x = _like(x, pair(x.name, 2**-5))
    for _ in range(net.random.randint(1, 2)):
        channels, kernel = net.pick(2, 3), net.pick(1, 3)
        integers = net.root.weights.integers(-8, 9, (channels, x.channels, kernel, kernel))
        weight = net.op(
            "DequantizeLinear", net.constant(integers, np.int8), net.constant(2**-4), net.constant(0, np.int8)
        )
        name = net.op("Conv", x.name, weight, pads=[kernel // 2] * 4)
        if net.chance(0.5):
            name = net.op("Relu", name)
        name = pair(name, 2**-4)
        if net.chance(0.3):
            name = pair(net.op("MaxPool", name, kernel_shape=[3, 3], pads=[1] * 4), 2**-4)
        x = Image(name, channels, x.height, x.width)
    return x


def _like(x: Image, name: str) -> Image:
    return Image(name, x.channels, x.height, x.width)


def _norm(net: Net, x: Image) -> Image:
    parts = [net.uniform(x.channels), net.normal(x.channels, scale=0.3), net.normal(x.channels, scale=0.3)]
    return _like(x, net.op("BatchNormalization", x.name, *parts, net.uniform(x.channels), epsilon=net.pick(1e-5, 1e-3)))


def _affine(net: Net, x: Image) -> Image:
    """BatchNormalization, or what exporters make of it."""
    if net.chance(0.4):
        return _norm(net, x)
    name = x.name
    for _ in range(net.random.randint(1, 3)):
        shape = net.pick((x.channels, 1, 1), (1, x.channels, 1, 1), (), (1,), (1, 1, 1))
        op = net.pick("Mul", "Add", "Sub", "Div")
        constant = net.uniform(*shape) if op in ("Mul", "Div") else net.normal(*shape, scale=0.3)
        flip = net.chance(0.4) and op != "Div"
        name = net.op(op, constant, name) if flip else net.op(op, name, constant)
    return _like(x, name)


def _activate(net: Net, x: Image) -> Image:
    if net.chance(0.15):
        return _like(x, net.op("PRelu", x.name, net.uniform(*net.pick((x.channels, 1, 1), (1,)))))
    return _like(x, net.activation(x.name))


def _conv_bn_relu(net: Net, x: Image) -> Image:
    return _activate(net, _affine(net, _conv(net, x)))


def _pool(net: Net, x: Image) -> Image:
    op, kernel, stride = net.pick("MaxPool", "AveragePool"), net.pick(1, 2, 3), net.pick(1, 2)
    pad = net.pick(0, 1) if kernel == 3 else 0
    attrs = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
    if op == "AveragePool" and net.chance(0.5):
        attrs["count_include_pad"] = 1
    name = net.op(op, x.name, **attrs)

    def size(dim: Dim) -> Dim:
        return tuple((value + 2 * pad - kernel) // stride + 1 for value in dim)

    return Image(name, x.channels, size(x.height), size(x.width))


def _residual(net: Net, x: Image) -> Image:
    y = _conv(net, x, same=True)
    if net.chance(0.5):
        y = _affine(net, y)
    if net.chance(0.5):
        y = _conv(net, _activate(net, y), same=True)
    return _like(x, net.either("Add", x.name, y.name))


def _parallel(net: Net, x: Image) -> Image:
    """Branches of one width that are added, with Add or Sum."""
    out = net.pick(2, 4)
    names = []
    for _ in range(net.random.randint(2, 3)):
        y = _conv(net, x, same=True, channels=out)
        names.append((_affine(net, y) if net.chance(0.5) else y).name)
    name = names[0]
    if net.chance(0.3):
        name = net.op("Sum", *names)
    else:
        for other in names[1:]:
            name = net.either("Add", name, other)
    return Image(name, out, x.height, x.width)


def _rep(net: Net, x: Image) -> Image:
    """RepVGG: convolutions, x itself and its batch norm, added."""
    names = [_affine(net, _conv(net, x, same=True)).name, _norm(net, x).name]
    if net.chance(0.5):
        names.append(x.name)
    if net.chance(0.5):
        attrs = {"kernel_shape": [3, 3], "pads": [1] * 4, "count_include_pad": net.pick(1, 1, 0)}
        names.append(net.op("AveragePool", x.name, **attrs))
    net.random.shuffle(names)
    name = names[0]
    for other in names[1:]:
        name = net.op("Add", name, other)
    return _like(x, name)


def _concat(net: Net, x: Image) -> Image:
    branches = [x if net.chance(0.3) else _conv(net, x, same=True, channels=net.pick(1, 2, 4)) for _ in range(2)]
    if net.chance(0.3):
        branches[0] = _activate(net, branches[0])
    name = net.op("Concat", *(branch.name for branch in branches), axis=net.pick(1, -3))
    merged = Image(name, sum(branch.channels for branch in branches), x.height, x.width)
    if net.chance(0.3) and merged.channels % 2 == 0:
        half = merged.channels // 2
        parts = net.split(name, [half, half], 1)
        return Image(net.either("Mul", *parts), half, x.height, x.width)
    return merged


def _squeeze_excite(net: Net, x: Image) -> Image:
    if net.chance(0.5):
        pooled = net.op("GlobalAveragePool", x.name)
    else:
        pooled = net.with_axes("ReduceMean", x.name, net.pick([2, 3], [-1, -2]), keepdims=1)
    mid = Image(pooled, x.channels, (1,) * net.runs, (1,) * net.runs)
    mid = _activate(net, Image(net.op("Conv", mid.name, net.normal(2, x.channels, 1, 1)), 2, mid.height, mid.width))
    gate = net.op("Conv", mid.name, net.normal(x.channels, 2, 1, 1), net.normal(x.channels))
    return _like(x, net.either("Mul", x.name, net.op(net.pick("Sigmoid", "HardSigmoid"), gate)))


def _resize(net: Net, x: Image) -> Image:
    if max(*x.height, *x.width) > 16:
        return x
    factor = net.pick(1, 2)
    attrs = {"mode": net.pick("nearest", "nearest", "linear"), "coordinate_transformation_mode": "asymmetric"}
    if attrs["mode"] == "nearest":
        attrs["nearest_mode"] = "floor"
    roi = net.constant([]) if net.opset < 13 else ""
    name = net.op("Resize", x.name, roi, net.constant([1, 1, factor, factor]), **attrs)
    return Image(name, x.channels, tuple(factor * v for v in x.height), tuple(factor * v for v in x.width))


def _transposed(net: Net, x: Image) -> Image:
    """ConvTranspose, perhaps with a norm."""
    if max(*x.height, *x.width) > 16:
        return x
    group = net.pick(1, x.channels)
    width, kernel, stride, pad = net.pick(1, 2), net.pick(2, 3), net.pick(1, 2), net.pick(0, 1)
    extra = net.pick(0, 1) if stride == 2 else 0
    attrs = {"strides": [stride] * 2, "pads": [pad] * 4, "group": group, "output_padding": [extra] * 2}
    inputs = [net.normal(x.channels, width, kernel, kernel, scale=(x.channels // group * 2) ** -0.5)]
    if net.chance(0.5):
        inputs.append(net.normal(group * width))
    name = net.op("ConvTranspose", x.name, *inputs, **attrs)

    def size(dim: Dim) -> Dim:
        return tuple((value - 1) * stride + kernel - 2 * pad + extra for value in dim)

    y = Image(name, group * width, size(x.height), size(x.width))
    return _affine(net, y) if net.chance(0.6) else y


def _channels_last(net: Net, x: Image) -> Image:
    """The way through [N, H, W, C] that converters from TensorFlow take."""
    name = net.op("Transpose", x.name, perm=[0, 2, 3, 1])
    for _ in range(net.random.randint(0, 3)):
        kind = net.random.randrange(5)
        if kind == 0:
            name = net.activation(name)
        elif kind == 1:
            name = net.either("Mul", name, net.uniform(*net.pick((x.channels,), (1, 1, x.channels))))
        elif kind == 2:
            name = net.either("Add", name, net.normal(x.channels, scale=0.3))
        elif kind == 3:
            name = net.op("Softmax", name, axis=net.pick(-1, 3))
        else:
            name = net.either("Mul", name, net.op("Sigmoid", net.with_axes("ReduceMean", name, [1, 2], keepdims=1)))
    return _like(x, net.op("Transpose", name, perm=[0, 3, 1, 2]))


def _padded(net: Net, x: Image) -> Image:
    """A Pad of its own, as Keras exports it; sometimes of nothing."""
    top, left = net.pick(0, 1), net.pick(0, 1)
    value = [net.constant(0.0)] if net.chance(0.5) else []
    name = net.op("Pad", x.name, net.ints(0, 0, top, left, 0, 0, top, left), *value, mode="constant")
    y = Image(name, x.channels, tuple(2 * top + v for v in x.height), tuple(2 * left + v for v in x.width))
    return _conv(net, y)


def _skip(net: Net, x: Image, seen: list[Image]) -> Image:
    """A sum with an earlier image of the same shape, if there is one."""
    same = [y for y in seen if (y.channels, y.height, y.width) == (x.channels, x.height, x.width)]
    return _like(x, net.either("Add", x.name, net.random.choice(same).name)) if same else _activate(net, x)


def _classify(net: Net, x: Image) -> None:
    pooled = net.random.randrange(3)
    if pooled == 0:
        flat = net.with_axes("ReduceMean", x.name, [2, 3], keepdims=0)
    else:
        name = net.op("GlobalAveragePool", x.name) if pooled == 1 else net.with_axes("ReduceMean", x.name, [-2, -1])
        how = net.random.randrange(4)
        if how == 0:
            flat = net.op("Flatten", name, axis=1)
        elif how == 1:
            flat = net.with_axes("Squeeze", name, net.pick([2, 3], [-1, -2]))
        elif how == 2:
            flat = net.reshape(name, net.pick(0, -1), x.channels)
        else:
            flat = net.reshape(name, net.size(name, 0), -1)
    flat = net.maybe_nothing(flat, 2)
    if net.chance(0.5):
        transposed = net.chance(0.5)
        weight = net.normal(*((3, x.channels) if transposed else (x.channels, 3)))
        name = net.op(
            "Gemm",
            flat,
            weight,
            net.normal(*net.pick((3,), (1, 3), ())),
            transB=int(transposed),
            alpha=net.pick(1.0, 0.5),
        )
    else:
        name = net.either("Add", net.op("MatMul", flat, net.normal(x.channels, 3)), net.normal(3))
    if net.chance(0.4):
        name = net.op("Sub", net.either("Mul", name, net.uniform(3)), net.constant(np.ones(1)))
    net.output(net.op("Softmax", name, axis=net.pick(1, -1)) if net.chance(0.5) else name, 2)
