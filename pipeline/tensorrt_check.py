"""An engine of a model without a KV cache against ONNX Runtime on the CPU, on random inputs."""

from collections.abc import Callable, Sequence

import numpy as np

from engines.backends.base import InferBackend
from engines.backends.onnxruntime import OnnxRuntimeModel
from engines.backends.tensorrt.profiles import Profile
from engines.manifest import CheckRecord
from passes.onnx_model import OnnxModel
from plugins.errors import KilnError

NAME = "engine against the model on a CPU"
_LIMIT = 5e-2
"""Largest relative error against the ONNX model on a CPU: that of a pass which changes precision."""


def checked_model(source: OnnxModel, profiles: Sequence[Profile], opened: Callable[[], InferBackend]) -> CheckRecord:
    """Compare at the best sizes of each profile. Raises KilnError beyond the limit."""
    engine, reference = opened(), OnnxRuntimeModel(source.path, optimized=False)
    worst = 0.0
    for profile in profiles:
        feeds = _random_inputs(source, profile)
        expected, found = reference.infer(feeds), engine.infer(feeds)
        for name, values in expected.items():
            difference = np.abs(found[name].astype(np.float64) - values).max()
            worst = max(worst, float(difference / max(float(np.abs(values).max()), 1e-30)))
    engine.close()
    reference.close()
    if not worst <= _LIMIT:
        raise KilnError(
            f"the engine differs from {source.path} by {worst:.1e} of the largest output; at most {_LIMIT:.0e} is "
            "expected: build with --trt-optimization-level 0, or with --precision fp32, to see which of the two it is"
        )
    return CheckRecord(name=NAME, value=worst, limit=_LIMIT, origin="random inputs")


def _random_inputs(model: OnnxModel, profile: Profile) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    feeds = {}
    for tensor in model.inputs:
        shape = profile.shapes(tensor)[1]
        kind = np.dtype(tensor.dtype).kind
        values = rng.standard_normal(shape) if kind == "f" else rng.integers(0, 2, shape)
        feeds[tensor.name] = values.astype(tensor.dtype)
    return feeds
