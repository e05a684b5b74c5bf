"""Operators between DequantizeLinear and QuantizeLinear become operators on 8-bit integers.

With `D` = DequantizeLinear and `Q` = QuantizeLinear, per tensor, 8-bit activations:

1. `Q(Conv(D(x), D(w)[, b]))` -> `QLinearConv(x, w[, b])`; `w` is constant, quantised per tensor or per output channel,
   or `Q(v)` with a constant `v`, as training with quantisation exports it; `b` is constant, FP32 or an int32 under `D`
   with scale `x_scale * w_scale`;
2. as 1 with `Relu` or `Clip` before Q, where Q saturates at least as early;
3. `Q(GlobalAveragePool(D(x)))`, or `Q(ReduceMean(D(x); 2, 3))` -> `com.microsoft::QLinearGlobalAveragePool(x)`;
4. `Q(AveragePool(D(x)))` -> `com.microsoft::QLinearAveragePool(x)`;
5. `Q(MaxPool(D(x)))`, Q as D -> `MaxPool(x)`, which is exact.

The others sum integers and round once where the original rounds floats and then quantises: the same formula, of which
a result may differ by one step. ONNX Runtime does the same when it loads a Q/DQ graph; done here, `LayoutNhwc` can see
the integer convolutions. Elementwise operators between Q and DQ are left to the runtime: they have no layout.
Left alone: scales that are not constant, a bias at another scale, other consumers between D and Q than the pattern.
"""

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.base import Effect, Outcome, Refusal
from passes.pattern import (
    CONTRIB,
    axes_of,
    input_of,
    is_op,
    new_constant,
    only_consumer,
    producer,
    rank_of,
    replace_node,
    rewrite_nodes,
    scalar_of,
    take_outputs,
    values_of,
)

_EIGHT_BITS = (np.dtype(np.uint8), np.dtype(np.int8))
_POOL_ATTRS = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")


class FuseQdq:
    """Implements `passes.base.Pass`."""

    name = "fuse_qdq"
    effect = Effect.PRECISION

    def call(self, graph: gs.Graph) -> Outcome:
        return rewrite_nodes(graph, _fuse, ["QuantizeLinear"])


@dataclass(frozen=True)
class _Quantised:
    """Per-tensor parameters of a Q or D node: `real = scale * (value - zero)`."""

    scale: NDArray
    zero: NDArray

    @property
    def inputs(self) -> tuple[NDArray, NDArray]:
        return self.scale, self.zero

    @property
    def range(self) -> tuple[float, float]:
        """The least and the greatest real value that can be stored."""
        limits = np.iinfo(self.zero.dtype)
        scale, zero = float(self.scale), int(self.zero)
        return scale * (limits.min - zero), scale * (limits.max - zero)


def _fuse(scope: gs.Graph, quantise: gs.Node) -> bool:
    result = _parameters(quantise, quantise.outputs[0])
    inner = producer(quantise.inputs[0])
    if result is None or inner is None or only_consumer(scope, quantise.inputs[0]) is not quantise:
        return False
    if is_op(inner, "Relu", "Clip") and _is_redundant(inner, result):
        behind = producer(inner.inputs[0], "Conv")
        if behind is None or only_consumer(scope, inner.inputs[0]) is not inner:
            return False
        inner = behind
    dequantise = producer(inner.inputs[0], "DequantizeLinear") if inner.inputs else None
    source = _parameters(dequantise, dequantise.inputs[0]) if dequantise else None
    if dequantise is None or source is None or source.zero.dtype != result.zero.dtype:
        return False
    data = dequantise.inputs[0]
    if inner.op == "Conv" and inner.domain == "":
        return _fuse_conv(scope, quantise, inner, data, source, result)
    return _fuse_pool(scope, quantise, inner, data, source, result)


def _parameters(node: gs.Node, stored: gs.Tensor) -> _Quantised | None:
    """Scale and zero point of a node with 8-bit values, as scalars; None unless both are constant and per tensor."""
    scale, zero = values_of(input_of(node, 1)), values_of(input_of(node, 2))
    if zero is None and input_of(node, 2) is None and stored.dtype is not None:
        zero = np.zeros((), stored.dtype)
    if scale is None or zero is None or scale.size != 1 or zero.dtype not in _EIGHT_BITS or scale.dtype != np.float32:
        return None
    return _Quantised(scale.reshape(()), zero.reshape(()))


def _is_redundant(node: gs.Node, result: _Quantised) -> bool:
    """Whether every value that a Relu or Clip would change is one that quantisation moves to the same bound anyway."""
    low, high = result.range
    if node.op == "Relu":
        return low >= 0
    bounds = []
    for index, name, default in ((1, "min", -np.inf), (2, "max", np.inf)):
        tensor = input_of(node, index)
        bound = node.attrs.get(name, default) if tensor is None else scalar_of(tensor)
        if bound is None:
            return False
        bounds.append(bound)
    return bounds[0] <= low and high <= bounds[1]


def _fuse_conv(
    scope: gs.Graph, quantise: gs.Node, conv: gs.Node, data: gs.Tensor, source: _Quantised, result: _Quantised
) -> bool:
    dequantise = producer(conv.inputs[1], "DequantizeLinear")
    weights = _stored_weights(dequantise.inputs[0]) if dequantise else None
    if dequantise is None or weights is None:
        return False
    scale, zero = _weight_parameters(dequantise, weights)
    inputs = [data, *source.inputs, weights, scale, zero, *result.inputs]
    if source.zero.dtype == np.int8 and zero.dtype != np.int8:
        raise Refusal("activations are int8, weights uint8; no kernel takes them together: quantise weights to int8")
    bias = input_of(conv, 2)
    if bias is not None:
        inputs.append(_integer_bias(bias, source.scale * scale))
    _replace(scope, quantise, gs.Node("QLinearConv", attrs=dict(conv.attrs)), inputs)
    return True


def _stored_weights(tensor: gs.Tensor) -> gs.Constant | NDArray | None:
    """Constant 8-bit weights: as they are, or computed where they are Q of a constant (ONNX, QuantizeLinear)."""
    if isinstance(tensor, gs.Constant):
        return tensor
    node = producer(tensor, "QuantizeLinear")
    values, scale, zero = (values_of(input_of(node, index)) for index in range(3)) if node else (None, None, None)
    if node is None or values is None or scale is None or zero is None or zero.dtype not in _EIGHT_BITS:
        return None
    if scale.size == 1:
        scale, zero = scale.reshape(()), zero.reshape(())
    elif node.attrs.get("axis", 1) % values.ndim == 0 and scale.shape == zero.shape == values.shape[:1]:
        scale, zero = (part.reshape(-1, *[1] * (values.ndim - 1)) for part in (scale, zero))
    else:
        return None
    limits = np.iinfo(zero.dtype)
    return np.clip(np.rint(values / scale) + zero, limits.min, limits.max).astype(zero.dtype)


def _weight_parameters(node: gs.Node, weights: gs.Constant | NDArray) -> tuple[NDArray, NDArray]:
    """Scale and zero point, `[M]` or `[]`."""
    scale, zero = values_of(input_of(node, 1)), values_of(input_of(node, 2))
    if input_of(node, 2) is None:
        zero = np.zeros(() if scale is None else scale.shape, weights.dtype)
    if scale is None or zero is None or zero.dtype not in _EIGHT_BITS or scale.dtype != np.float32:
        raise Refusal("weights need constant FP32 scales and 8-bit zero points")
    if scale.size == 1:
        return scale.reshape(()), zero.reshape(())
    axis = node.attrs.get("axis", 1) % len(weights.shape)
    if axis != 0 or scale.shape != (weights.shape[0],) or node.attrs.get("block_size", 0):
        raise Refusal(
            f"weights are quantised along axis {axis} by {list(scale.shape)} scales; expected axis 0, one each"
        )
    if np.any(zero != zero[0]):
        raise Refusal("weights have a zero point per channel; ONNX Runtime takes one for all: quantise symmetrically")
    return scale, zero


def _integer_bias(bias: gs.Tensor, scale: NDArray) -> NDArray:
    """The bias in units of `x_scale * w_scale`, int32."""
    node = producer(bias, "DequantizeLinear")
    if node is not None:
        stored, own, zero = (values_of(input_of(node, index)) for index in range(3))
        if stored is None or own is None or stored.dtype != np.int32:
            raise Refusal("the bias is not a constant int32 with a constant scale")
        if (zero is None and input_of(node, 2) is not None) or (zero is not None and np.any(zero)):
            raise Refusal("the bias has a zero point other than 0")
        if not np.allclose(np.broadcast_to(own, stored.shape), scale, rtol=1e-6, atol=0):
            raise Refusal("the bias is not quantised by x_scale * w_scale")
        return stored
    values = values_of(bias)
    if values is None:
        raise Refusal("the bias is not constant")
    units = np.rint(values.astype(np.float64) / scale)
    if np.abs(units).max(initial=0) > np.iinfo(np.int32).max:
        raise Refusal("the bias does not fit an int32 in units of x_scale * w_scale")
    return units.astype(np.int32)


def _fuse_pool(
    scope: gs.Graph, quantise: gs.Node, pool: gs.Node, data: gs.Tensor, source: _Quantised, result: _Quantised
) -> bool:
    if is_op(pool, "MaxPool"):
        if len(pool.outputs) != 1 or scope.opset < 12 or not _same(source, result):
            return False
        _replace(scope, quantise, gs.Node("MaxPool", attrs=dict(pool.attrs)), [data])
        return True
    inputs = [data, *source.inputs, *result.inputs]
    if is_op(pool, "AveragePool"):
        if any(dilation != 1 for dilation in pool.attrs.get("dilations", [])):
            return False
        attrs = {key: value for key, value in pool.attrs.items() if key in _POOL_ATTRS}
        _replace(scope, quantise, gs.Node("QLinearAveragePool", attrs=attrs, domain=CONTRIB), inputs)
        return True
    if is_op(pool, "GlobalAveragePool") or _is_mean_of_image(pool):
        _replace(scope, quantise, gs.Node("QLinearGlobalAveragePool", domain=CONTRIB), inputs)
        return True
    return False


def _same(left: _Quantised, right: _Quantised) -> bool:
    return left.scale == right.scale and left.zero == right.zero


def _is_mean_of_image(node: gs.Node) -> bool:
    axes = axes_of(node) if is_op(node, "ReduceMean") and rank_of(node.inputs[0]) == 4 else None
    return axes is not None and sorted(axis % 4 for axis in axes) == [2, 3] and bool(node.attrs.get("keepdims", 1))


def _replace(scope: gs.Graph, quantise: gs.Node, new: gs.Node, inputs: "list[gs.Tensor | NDArray]") -> None:
    """Put `new` in the place of Q, with arrays among its inputs as constants."""
    result = quantise.outputs[0]
    new.name = f"{result.name}/{new.op}"
    new.inputs = [
        operand if isinstance(operand, gs.Tensor) else new_constant(result, f"input{index}", np.asarray(operand))
        for index, operand in enumerate(inputs)
    ]
    new.outputs = take_outputs(quantise)
    replace_node(scope, quantise, new)
