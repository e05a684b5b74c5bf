"""Whether arrays are what a model takes, asked in the same words whichever backend runs it."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from engines.runtime.info import TensorInfo
from plugins.errors import KilnError


def check_inputs(tensors: Sequence[TensorInfo], inputs: Mapping[str, NDArray]) -> None:
    """Raise KilnError naming a missing, unknown, mis-shaped or mis-typed input. Types are not converted."""
    known = [tensor.name for tensor in tensors]
    missing = sorted(set(known) - set(inputs))
    unknown = sorted(set(inputs) - set(known))
    if missing or unknown:
        found = ", ".join(sorted(inputs)) or "none"
        raise KilnError(
            f"found inputs {found}; the model expects {', '.join(known)}"
            + (f": add {', '.join(missing)}" if missing else "")
            + (f": leave out {', '.join(unknown)}" if unknown else "")
        )
    for tensor in tensors:
        _check_input(tensor, inputs[tensor.name])


def _check_input(tensor: TensorInfo, array: NDArray) -> None:
    name, dtype, shape = tensor.name, tensor.dtype, tensor.shape
    if not isinstance(array, np.ndarray):
        raise KilnError(f"input {name} is a {type(array).__name__}; expected a NumPy array of {dtype}")
    if array.dtype != np.dtype(dtype):
        raise KilnError(f"input {name} has dtype {array.dtype}; expected {dtype}: convert it with .astype()")
    fits = len(shape) == array.ndim and all(
        not isinstance(want, int) or want == have for want, have in zip(shape, array.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise KilnError(f"input {name} has shape {list(array.shape)}; expected [{wanted}]")
