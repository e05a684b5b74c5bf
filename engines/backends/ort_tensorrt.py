"""ONNX Runtime's own TensorRT providers: the options they get, and their engine caches, which belong into a bundle.

`ort-trt` is TensorrtExecutionProvider of onnxruntime-gpu, `ort-trt-rtx` the NvTensorRTRTX provider, a library of its
own that is registered at run time. Both leave what TensorRT cannot take to other providers; both take the profiles
that a plan of ours gets. Option names are those of onnxruntime-gpu 1.31 and of tensorrt_rtx_provider_options.h 0.5.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from engines.backends.onnxruntime import CPU, OnnxRuntimeModel, ort_message
from engines.backends.tensorrt.api import tensorrt_module
from engines.backends.tensorrt.key import EngineKey, refuse_mismatch
from engines.backends.tensorrt.opening import machine_key
from engines.backends.tensorrt.options import TensorRtOptions, options_from_dict
from engines.backends.tensorrt.profiles import Profile
from passes.onnx_model import Tensor
from plugins.errors import KilnError

Backend = Literal["ort-trt", "ort-trt-rtx"]
BACKENDS: tuple[str, ...] = get_args(Backend)
PROVIDERS: Mapping[Backend, str] = {
    "ort-trt": "TensorrtExecutionProvider",
    "ort-trt-rtx": "NvTensorRTRTXExecutionProvider",
}
CACHE = "engine-cache"
"""Folder in a bundle."""
PACKAGES: Mapping[Backend, str] = {"ort-trt": "onnxruntime-gpu", "ort-trt-rtx": "onnxruntime-ep-nv-tensorrt-rtx-cu13"}
"""Which distribution brings the provider."""
_TAKEN: Mapping[Backend, tuple[str, ...]] = {
    "ort-trt": ("workspace", "optimization_level", "strip_weights", "refit", "hardware"),
    "ort-trt-rtx": ("workspace",),
}
"""Options that have a counterpart; the others must stay at their defaults."""


def provider_options(
    backend: Backend, inputs: Sequence[Tensor], profiles: Sequence[Profile], options: TensorRtOptions, cache: Path
) -> dict[str, str]:
    """By name, as ONNX Runtime takes them. Raises KilnError for an option that the provider has no counterpart of."""
    default = TensorRtOptions().to_dict()
    for name, value in options.to_dict().items():
        if value != default[name] and name not in _TAKEN[backend]:
            raise KilnError(
                f"--trt-{name.replace('_', '-')} is {value}, which {PROVIDERS[backend]} has no option for; leave it "
                "out, or build with --backend tensorrt"
            )
    prefix = "trt_" if backend == "ort-trt" else "nv_"
    found = {
        f"{prefix}profile_{word}_shapes": _shapes(inputs, profiles, number)
        for number, word in enumerate(("min", "opt", "max"))
    }
    if options.workspace is not None:
        found[f"{prefix}max_workspace_size"] = str(options.workspace)
    return found | (_trt(options, cache) if backend == "ort-trt" else _rtx(profiles, cache))


def _trt(options: TensorRtOptions, cache: Path) -> dict[str, str]:
    found = {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(cache),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(cache),
        "trt_builder_optimization_level": str(options.optimization_level),
    }
    if options.hardware == "same-capability":
        raise KilnError(
            "--trt-hardware same-capability has no counterpart in TensorrtExecutionProvider; it knows this "
            "and ampere-plus"
        )
    if options.hardware == "ampere-plus":
        found["trt_engine_hw_compatible"] = "1"
    if options.strip_weights:
        found |= {"trt_weight_stripped_engine_enable": "1", "trt_onnx_model_folder_path": str(cache.parent)}
    return found


def _rtx(profiles: Sequence[Profile], cache: Path) -> dict[str, str]:
    found = {"nv_runtime_cache_path": str(cache)}
    return found | ({"nv_multi_profile_enable": "1"} if len(profiles) > 1 else {})


def _shapes(inputs: Sequence[Tensor], profiles: Sequence[Profile], number: int) -> str:
    """`name:1x3x8x8,...`: of each input once for each profile; inputs of fixed shape are left out."""
    return ",".join(
        f"{tensor.name}:{'x'.join(map(str, profile.shapes(tensor)[number]))}"
        for profile in profiles
        for tensor in inputs
        if any(isinstance(size, str) for size in tensor.shape)
    )


def provider_version(backend: Backend) -> str:
    """Version of the TensorRT that makes the engines; of the RTX provider, which carries its own, the provider's."""
    return tensorrt_module().__version__ if backend == "ort-trt" else version(PACKAGES[backend])


def session_from_options(model: Path, backend: Backend, options: Mapping[str, str]) -> Any:
    """An ONNX Runtime session on the provider, and on the CPU for what it leaves.

    Raises KilnError saying what is missing and how to install it.
    """
    import onnxruntime

    provider = PROVIDERS[backend]
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    if backend == "ort-trt-rtx":
        _add_rtx(onnxruntime, settings, options)
    elif provider not in onnxruntime.get_available_providers():
        raise KilnError(f"the installed onnxruntime has no {provider}; install {PACKAGES[backend]} and tensorrt")
    providers = [] if backend == "ort-trt-rtx" else [(provider, dict(options)), CPU]
    try:
        return onnxruntime.InferenceSession(str(model), settings, providers=providers or None)
    except Exception as error:
        raise KilnError(
            f"{provider} cannot load {model}: {ort_message(error)}; kiln doctor says what is missing"
        ) from error


def _add_rtx(onnxruntime: Any, settings: Any, options: Mapping[str, str]) -> None:
    provider = PROVIDERS["ort-trt-rtx"]
    try:
        import onnxruntime_ep_nv_tensorrt_rtx as package

        if provider not in {device.ep_name for device in onnxruntime.get_ep_devices()}:
            onnxruntime.register_execution_provider_library(provider, package.get_library_path())
    except Exception as error:
        raise KilnError(
            f"{provider} cannot be registered ({str(error).splitlines()[0]}); install {PACKAGES['ort-trt-rtx']}"
        ) from error
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == provider]
    if not devices:
        raise KilnError(f"{provider} finds no GPU that it runs on: it needs compute capability 8.0, 8.6, 8.9 or 12.0")
    settings.add_provider_for_devices(devices[:1], dict(options))


class OrtTensorRtModel(OnnxRuntimeModel):
    """Implements `InferBackend` with one of the providers. Its engines are in `CACHE` beside `model`.

    In a published bundle they are all there, and the key was compared before: nothing is written any more.
    """

    def __init__(
        self,
        model: Path,
        backend: Backend,
        inputs: Sequence[Tensor],
        profiles: Sequence[Profile],
        options: TensorRtOptions,
    ) -> None:
        found = provider_options(backend, inputs, profiles, options, model.parent / CACHE)
        self._use(session_from_options(model, backend, found), model)


def fill_engine_cache(
    model: Path, backend: Backend, inputs: Sequence[Tensor], profiles: Sequence[Profile], options: TensorRtOptions
) -> list[Path]:
    """Run once at the best sizes of each profile, so that a bundle's folder holds the engines before it is published.

    Raises KilnError where the provider wrote none: it then computes nothing of the graph.
    """
    cache = model.parent / CACHE
    cache.mkdir()
    session = OrtTensorRtModel(model, backend, inputs, profiles, options)
    for profile in profiles:
        session.infer({tensor.name: np.zeros(profile.shapes(tensor)[1], tensor.dtype) for tensor in inputs})
    session.close()  # the RTX provider writes its cache when the session ends
    files = sorted(file for file in cache.rglob("*") if file.is_file())
    if not files:
        raise KilnError(f"{PROVIDERS[backend]} built no engine of {model}: it takes none of its operators")
    return files


def model_from_engine_cache(
    model: Path,
    built: EngineKey,
    inputs: Sequence[Tensor],
    profiles: Sequence[Profile],
    options: Mapping[str, Any],
) -> OrtTensorRtModel:
    """Open a bundle's model with the engines beside it. Raises KilnError where they were built for another setting."""
    backend: Backend = "ort-trt" if built.product == "tensorrt" else "ort-trt-rtx"
    refuse_mismatch(built, machine_key(built, provider_version(backend)), model)
    return OrtTensorRtModel(model, backend, inputs, profiles, options_from_dict(options))
