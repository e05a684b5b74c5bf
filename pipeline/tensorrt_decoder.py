"""A decoder's graph for TensorRT: which form its attention takes, the graph of that form, and how both are judged.

`plugin` keeps the paged cache and Kiln's own kernels; `native` is TensorRT's own layers over a linear cache, a row of
the longest context for each running sequence. Attention and cache are 16-bit in both. Knows nothing of plans.
"""

import ctypes
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engines.backends.base import DecoderBackend
from engines.backends.tensorrt.api import Attention
from engines.backends.tensorrt.linear_decoder import LinearDecoder, OrtLinearGraph
from engines.backends.tensorrt.linear_graph import linear_graph
from engines.backends.tensorrt.native_graph import native_graph
from engines.backends.tensorrt.plugin_graph import PluginTarget, plugin_graph
from engines.manifest import CheckRecord
from engines.sku import Sku
from passes.onnx_model import DecoderSpec, OnnxModel
from passes.standard import PassSwitches
from pipeline.buildable import attention_problem
from pipeline.compare.onnx_subject import bound_graph
from pipeline.packed import logits_of_backend, packed_logits
from plugins.build import cpu_library
from plugins.cuda_runtime import cuda_driver
from plugins.errors import KilnError
from plugins.paged_attention.tensorrt_plugin import Kernels

SWITCHES = PassSwitches(options={"pack_matmuls": {"packed_attention": False}})
"""TensorRT merges queries, keys and values itself; packed ones it takes apart and multiplies in float."""
LIMIT = 5e-2
"""Largest relative error of logits: that of attention and cache in 16 bits."""
BEYOND = 1.5
"""How much further from the float graph than the quantised one a form of the latter may be: where one value is rounded
the other way, so are those that depend on it, and both end equally far from the float graph, but apart."""
_MULTIPROCESSORS = 16
"""CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT."""
_STEPS = ((8, 5), (6, 1), (1, 1), (1, 1))
"""New tokens of two sequences, step by step: prompts, a step that mixes, and two that decode."""


@dataclass(frozen=True)
class DecoderForm:
    """`model` is what profiles are checked on, `parsed` what TensorRT reads where that is another file."""

    attention: Attention
    model: OnnxModel
    parsed: Path | None = None
    kernels: Kernels | None = None


def attention_for(sku: Sku, asked: Attention | None, backend: str) -> Attention:
    """The form of a decoder's attention. Raises KilnError for one that the SKU or the backend does not run."""
    if backend not in ("tensorrt", "tensorrt_rtx"):
        raise KilnError(
            f"decoders are built as plans of TensorRT itself; found --backend {backend}, which keeps no cache of "
            "theirs: leave it out"
        )
    problem = attention_problem(sku)
    if asked == "plugin" and problem is not None:
        raise KilnError(problem)
    if asked == "plugin" and backend == "tensorrt_rtx":
        raise KilnError("TensorRT-RTX takes no plug-ins from Python: leave --attention plugin out")
    if asked is not None:
        return asked
    return "native" if problem is not None or backend == "tensorrt_rtx" else "plugin"


def decoder_form(model: OnnxModel, attention: Attention, target: PluginTarget, folder: Path) -> DecoderForm:
    """Write the graph that TensorRT gets into `folder`. Raises KilnError for what the form cannot do."""
    if attention == "native":
        made = linear_graph(model, folder / "linear.onnx", target.element)
        return DecoderForm(attention, made, native_graph(made, folder / "native.onnx"))
    made, kernels = plugin_graph(model, folder / "plugin.onnx", target)
    return DecoderForm(attention, made, None, kernels)


def multiprocessors(sku: Sku) -> int:
    """Over which the plug-in splits contexts: of this machine's first GPU, of the SKU where there is no driver.

    Raises KilnError where neither tells.
    """
    device, found = ctypes.c_int(), ctypes.c_int()
    try:
        driver = cuda_driver()
    except KilnError:
        if sku.multiprocessors is None:
            raise
        return sku.multiprocessors
    if driver.cuDeviceGet(ctypes.byref(device), 0) or driver.cuDeviceGetAttribute(
        ctypes.byref(found), _MULTIPROCESSORS, device
    ):
        raise KilnError("the CUDA device does not say how many multiprocessors it has; see kiln doctor")
    return found.value


def linear_check(source: OnnxModel, form: DecoderForm, floats: OnnxModel | None = None) -> CheckRecord | None:
    """The native form in ONNX Runtime against the serving graph, both on this CPU; None where it has no kernels.

    `floats` is what a quantised `source` was made from.
    """
    if form.attention != "native":
        return None
    decoder = form.model.decoder
    assert decoder is not None
    if decoder.kv.dtype == "bfloat16":
        return None
    rows = len(_STEPS[0])

    def opened() -> DecoderBackend:
        return LinearDecoder(OrtLinearGraph(form.model.path, decoder.kv, rows), decoder.kv, rows)

    return checked(source, opened, decoder, "linear graph against the serving graph on a CPU", floats=floats)


def checked(
    source: OnnxModel,
    opened: Callable[[], DecoderBackend],
    decoder: DecoderSpec,
    name: str,
    running: int = 2,
    floats: OnnxModel | None = None,
) -> CheckRecord:
    """Logits of a few steps against those of the serving graph in ONNX Runtime. Raises KilnError beyond the limit.

    That is LIMIT, and of a quantised graph, which is held against `floats`, BEYOND times its own error more.
    """
    assert source.decoder is not None
    sequences = min(running, len(_STEPS[0]))
    steps = [list(step[:sequences]) for step in _STEPS]
    texts = _texts(source.decoder, steps)
    expected, limit, against = _logits_on_cpu(source, texts, steps), LIMIT, ""
    if floats is not None:
        quantised, expected = expected, _logits_on_cpu(floats, texts, steps)
        limit, against = LIMIT + BEYOND * _relative_error(quantised, expected), " of the float graph"
    backend = opened()
    found = logits_of_backend(backend, decoder, texts, steps, last_rows=1)
    backend.close()
    worst = _relative_error(found, expected)
    if not worst <= limit:
        raise KilnError(
            f"{name}: logits of {source.path} differ by {worst:.1e} of the largest{against}; at most {limit:.0e} is "
            "expected: report it with the model"
        )
    return CheckRecord(name=name, value=worst, limit=limit, origin="random tokens")


def _logits_on_cpu(model: OnnxModel, texts: list[NDArray], steps: list[list[int]]) -> list[NDArray]:
    assert model.decoder is not None
    with tempfile.TemporaryDirectory(prefix="kiln-check-") as folder:
        bound = bound_graph(model.path, Path(folder))
        return packed_logits(bound, model.decoder, [cpu_library()], texts, steps, optimized=False, last_rows=1)


def _relative_error(found: list[NDArray], expected: list[NDArray]) -> float:
    """Largest difference, of the largest logit."""
    largest = max(float(np.abs(values).max()) for values in expected)
    return max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True)) / max(largest, 1e-30)


def _texts(decoder: DecoderSpec, steps: list[list[int]]) -> list[NDArray]:
    lengths = np.minimum(np.sum(steps, axis=0), decoder.max_context)
    rng = np.random.default_rng(0)
    return [rng.integers(0, decoder.vocab_size, length).astype(np.int32) for length in lengths.tolist()]
