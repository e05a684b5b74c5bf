"""Scales and zero points of tensors, and the QuantizeLinear and DequantizeLinear nodes that carry them.

A real value is scale * (stored - zero). Stored types are uint8, int8 and FP8 E4M3 (float8e4m3fn, 448 at most, which
scales without a zero point: Micikevicius et al., 2022).
"""

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.pattern import STANDARD, insert_before, new_constant, new_variable
from passes.quantization.table import Range

Stored = Literal["uint8", "int8", "float8e4m3fn"]
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_LARGEST = 448.0
_LARGEST_BIAS = 2.0**30


@dataclass(frozen=True)
class Parameters:
    """Of one tensor, or of each channel: arrays of one shape."""

    scale: NDArray[np.float32]
    zero: NDArray

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.zero.dtype)


def activation_parameters(found: Range, stored: Stored, bounds: tuple[float, float] | None = None) -> Parameters:
    """What spans a calibrated range, and zero. `bounds` are those that a Relu or Clip sets: never beyond them.

    uint8 spans it from end to end; int8 and FP8 are symmetric, int8 without -128.
    """
    low, high = min(found.low, 0.0), max(found.high, 0.0)
    if bounds is not None:
        low, high = max(low, min(bounds[0], 0.0)), min(high, max(bounds[1], 0.0))
    if stored != "uint8":
        largest = max(-low, high)
        scale = largest / (127 if stored == "int8" else FP8_LARGEST)
        return Parameters(np.array(scale or 1.0, np.float32), np.zeros((), _FP8 if stored != "int8" else np.int8))
    step = np.array((high - low) / 255 or 1.0, np.float32)
    while bounds is not None and float(step) * 255 > high - low > 0:
        step = np.nextafter(step, np.float32(0))  # so that the fusion sees that Clip changes nothing
    return Parameters(np.asarray(step), np.asarray(np.clip(np.rint(-low / step), 0, 255), np.uint8))


def fp8_weight(weight: NDArray[np.floating], axis: int) -> tuple[NDArray, Parameters]:
    """Weights as E4M3 with one scale for each index of `axis`."""
    others = tuple(index for index in range(weight.ndim) if index != axis)
    largest = np.abs(weight).max(axis=others).astype(np.float32)
    scale = np.where(largest > 0, largest / FP8_LARGEST, 1).astype(np.float32)
    shape = [1] * weight.ndim
    shape[axis] = -1
    stored = np.clip(weight / scale.reshape(shape), -FP8_LARGEST, FP8_LARGEST).astype(_FP8)
    return stored, Parameters(scale, np.zeros(len(scale), _FP8))


def scale_for_bias(scales: NDArray[np.float32], bias: NDArray | None, activation: Parameters) -> NDArray[np.float32]:
    """Weight scales, raised where the bias would not fit an int32 in units of activation scale * weight scale."""
    least = 0.0 if bias is None else np.abs(bias) / (float(activation.scale) * _LARGEST_BIAS)
    raised = np.maximum(scales, least).astype(np.float32)
    return np.where(raised > 0, raised, 1).astype(np.float32)


def integer_bias(bias: NDArray, scale: NDArray) -> NDArray[np.int32]:
    return np.rint(bias.astype(np.float64) / scale.astype(np.float64)).astype(np.int32)


def quantise(scope: gs.Graph, tensor: gs.Tensor, parameters: Parameters) -> gs.Variable:
    """A QuantizeLinear behind what makes `tensor`; returns its result."""
    stored = new_variable(tensor, f"as_{parameters.dtype}", tensor.shape, parameters.dtype)
    inputs = [tensor, *_constants(stored, parameters, tensor.dtype)]
    _insert_behind(scope, tensor, gs.Node("QuantizeLinear", stored.name, {}, inputs, [stored], domain=STANDARD))
    return stored


def dequantise(scope: gs.Graph, stored: gs.Variable) -> gs.Variable:
    """The DequantizeLinear that goes with what `quantise` returned."""
    node = stored.inputs[0]
    result = new_variable(stored, "dequantised", stored.shape, node.inputs[0].dtype)
    inputs = [stored, *node.inputs[1:]]
    _insert_behind(scope, stored, gs.Node("DequantizeLinear", result.name, {}, inputs, [result], domain=STANDARD))
    return result


def dequantised_constant(
    scope: gs.Graph, beside: gs.Tensor, suffix: str, stored: NDArray, parameters: Parameters, axis: int, place: gs.Node
) -> gs.Variable:
    """A constant behind a DequantizeLinear along `axis` in front of `place`, in the type of `beside`."""
    result = new_variable(beside, suffix, list(stored.shape))
    inputs = [new_constant(result, "stored", stored), *_constants(result, parameters, beside.dtype)]
    insert_before(scope, place, gs.Node("DequantizeLinear", result.name, {"axis": axis}, inputs, [result]))
    return result


def _constants(beside: gs.Tensor, parameters: Parameters, dtype: Any) -> tuple[gs.Constant, gs.Constant]:
    scale = parameters.scale if dtype is None else parameters.scale.astype(dtype)
    return new_constant(beside, "scale", scale), new_constant(beside, "zero", parameters.zero)


def _insert_behind(scope: gs.Graph, tensor: gs.Tensor, node: gs.Node) -> None:
    made_at = next((i for i, made in enumerate(scope.nodes) if any(made is p for p in tensor.inputs)), -1)
    scope.nodes.insert(made_at + 1, node)
