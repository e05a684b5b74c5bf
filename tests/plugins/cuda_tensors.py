"""What tests of Kiln's CUDA library share: the library for this device, tensors on it, and how far a result is off.

It knows no operator. Only tests that need a device import it: without torch, importing it skips them.
"""

import ctypes
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from plugins.cuda_build import cuda_library

torch = pytest.importorskip("torch")


def library_path() -> Path:
    """The library for this machine's device, compiled at the first call."""
    major, minor = torch.cuda.get_device_capability()
    return cuda_library([f"sm_{major}{minor}"])


def loaded_library() -> ctypes.CDLL:
    return ctypes.CDLL(str(library_path()))


def random(seed: int, dtype: str, *shape: int, scale: float = 1.0) -> "torch.Tensor":
    """From a normal distribution whose standard deviation is `scale`."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(getattr(torch, dtype))


def poisoned(dtype: str, *shape: int) -> "torch.Tensor":
    """NaN, which stays where a kernel does not write."""
    return torch.full(shape, float("nan"), dtype=getattr(torch, dtype), device="cuda")


def wide(tensor: "torch.Tensor | None") -> NDArray[np.float64] | None:
    """In float64 on the host, as references take it; None for a left out operand."""
    return None if tensor is None else tensor.double().cpu().numpy()


def error(y: "torch.Tensor", expected: NDArray) -> float:
    """||y - expected|| / ||expected||."""
    return float(np.linalg.norm(wide(y) - expected) / np.linalg.norm(expected))
