"""What the products with 16-bit weights compute, in NumPy and float64. For tests; speed does not matter."""

import numpy as np
from numpy.typing import NDArray

from plugins.elementwise.reference import swiglu


def linear(x: NDArray, weight: NDArray, bias: NDArray | None = None) -> NDArray[np.float64]:
    """y [..., width] of x [..., depth], weight [width, depth] and bias [width]."""
    y = x.astype(np.float64) @ weight.astype(np.float64).T
    return y if bias is None else y + bias.astype(np.float64)


def linear_swiglu(x: NDArray, weight: NDArray, bias: NDArray | None = None) -> NDArray[np.float64]:
    """y [..., width] of x [..., depth], weight [2 * width, depth] and bias [2 * width], the gate's half first."""
    both = linear(x, weight, bias)
    width = both.shape[-1] // 2
    return swiglu(both[..., :width], both[..., width:])
