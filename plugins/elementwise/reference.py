"""What the token-wise operators compute, in NumPy and float64. For tests; speed does not matter."""

import numpy as np
from numpy.typing import NDArray


def add_rms_norm(x: NDArray, skip: NDArray, gamma: NDArray, epsilon: float = 1e-5) -> tuple[NDArray, NDArray]:
    """(normalized, sum) of float32 arrays [..., hidden]: the sum rounded to float32, the rest in float64."""
    with np.errstate(all="ignore"):
        total = (x + skip).astype(np.float32)
        wide = total.astype(np.float64)
        mean = np.sum(wide * wide, axis=-1, keepdims=True) / max(1, x.shape[-1])
        return wide / np.sqrt(mean + np.float64(np.float32(epsilon))) * gamma.astype(np.float64), total


def swiglu(gate: NDArray, up: NDArray, alpha: float = 1.0) -> NDArray:
    """gate * sigmoid(alpha * gate) * up of arrays of one shape."""
    wide = gate.astype(np.float64)
    with np.errstate(all="ignore"):
        return wide / (1 + np.exp(-alpha * wide)) * up.astype(np.float64)
