"""What quantised rows and products are, in NumPy: rows bit by bit, products in integers and float64. Speed does not
matter.
"""

import numpy as np
from numpy.typing import NDArray

from plugins.elementwise.reference import add_rms_norm, swiglu

SMALLEST = np.float32(2.0**-100)
"""Groups with a smaller largest magnitude count as zeros."""


def quantize_rows(x: NDArray[np.float32], group_size: int = 0) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """(q, scale) of float32 rows [..., k]: [..., k] and [..., groups]. Exact: kernels give the same bits."""
    size = group_size or x.shape[-1]
    groups = max(1, -(-x.shape[-1] // size)) if size else 1
    q, scale = np.zeros(x.shape, np.int8), np.zeros((*x.shape[:-1], groups), np.float32)
    for g in range(groups):
        part = x[..., g * size : (g + 1) * size]
        largest = np.abs(part).max(axis=-1, initial=0)
        usual = np.isfinite(largest) & (largest >= SMALLEST)
        safe = np.where(usual, largest, np.float32(1))
        rounded = np.rint(np.where(usual[..., None], part, np.float32(0)) * (np.float32(127) / safe)[..., None])
        q[..., g * size : (g + 1) * size] = rounded
        scale[..., g] = np.where(usual, safe / np.float32(127), np.where(np.isfinite(largest), 0, np.nan))
    return q, scale


def add_rms_norm_quantize(
    x: NDArray, skip: NDArray, gamma: NDArray, epsilon: float = 1e-5, group_size: int = 0
) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float32]]:
    """(q, scale, sum). The norm is in float64, so that a q next to a tie may differ from a kernel's by one."""
    normalized, total = add_rms_norm(x, skip, gamma, epsilon)
    return *quantize_rows(normalized.astype(np.float32), group_size), total


def swiglu_quantize(
    gate: NDArray, up: NDArray, alpha: float = 1.0, group_size: int = 0
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """(q, scale), in the same way."""
    return quantize_rows(swiglu(gate, up, alpha).astype(np.float32), group_size)


def int8_matmul(
    q: NDArray[np.int8],
    scale: NDArray[np.float32],
    weights: NDArray[np.int8],
    weight_scale: NDArray[np.float32],
    bias: NDArray[np.float32] | None = None,
    group_size: int = 0,
    activation_group_size: int = 0,
    weight_zero: NDArray[np.float32] | None = None,
) -> NDArray[np.float64]:
    """y [..., n] of q [..., k], scale [..., groups], weights [k, n], weight_scale and weight_zero [n, groups]."""
    x = q.astype(np.int64) * _spread(scale, q.shape[-1], activation_group_size)
    return weight_matmul(x, weights, weight_scale, bias, group_size, weight_zero)


def weight_matmul(
    x: NDArray,
    weights: NDArray[np.int8],
    weight_scale: NDArray[np.float32],
    bias: NDArray[np.float32] | None = None,
    group_size: int = 0,
    weight_zero: NDArray[np.float32] | None = None,
) -> NDArray[np.float64]:
    """y [..., n] of x [..., k], weights [k, n], weight_scale and weight_zero [n, groups]."""
    k = len(weights)
    zeros = 0.0 if weight_zero is None else _spread(weight_zero, k, group_size).T
    with np.errstate(all="ignore"):
        y = x.astype(np.float64) @ ((weights - zeros) * _spread(weight_scale, k, group_size).T)
    return y if bias is None else y + bias


def _spread(scale: NDArray[np.float32], k: int, group_size: int) -> NDArray[np.float64]:
    """[..., k]: each value's scale, of [..., groups]."""
    return np.repeat(scale.astype(np.float64), group_size or k, axis=-1)[..., :k]
