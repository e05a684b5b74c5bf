"""How each kind of bundle is opened for a profile: as it is served, or so that its operators or layers are timed."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from engines.backends.base import DecoderBackend, InferBackend
from engines.backends.onnxruntime import CPU, OnnxRuntimeDecoder, OnnxRuntimeModel
from engines.backends.tensorrt.layer_times import LayerTimes
from engines.bundle import EngineBundle
from engines.manifest import Manifest
from engines.runtime.opening import cuda_decoder, default_config, default_ladder, tensorrt_decoder, tensorrt_model
from engines.runtime.scheduler import SchedulerConfig
from passes.onnx_model import DecoderSpec

Timed = Path | LayerTimes | None
"""Where times go: a file that ONNX Runtime writes, what TensorRT reports to; None for none."""
Open = Callable[[Timed, Mapping[str, str] | None], Any]
"""The second argument are ONNX Runtime's session entries."""


def opener_of_decoder(
    bundle: EngineBundle, decoder: DecoderSpec, scheduling: SchedulerConfig, blocks: int, threads: int, ladder: Any
) -> Open:
    """`blocks` and `ladder` (of decode steps that are captured) are not TensorRT's, whose plans have them fixed."""
    record = bundle.manifest.tensorrt

    def open_backend(timed: Timed, entries: Mapping[str, str] | None) -> DecoderBackend:
        if record is not None:
            assert not isinstance(timed, Path)
            return tensorrt_decoder(bundle, record, decoder, scheduling, {}, timed)
        assert not isinstance(timed, LayerTimes)
        if ladder:  # a GPU's operators take weights as they are stored, so that `entries` have nothing to say
            return cuda_decoder(bundle, decoder, scheduling, blocks, 0, None, ladder, profile=timed)
        return OnnxRuntimeDecoder(
            bundle.engine_path,
            decoder.kv,
            blocks,
            plugins=bundle.plugin_paths,
            threads=threads,
            config=entries,
            profile=timed,
        )

    return open_backend


def opener_of_model(bundle: EngineBundle, threads: int) -> Open:
    """The same for a model without a KV cache."""
    record, backend = bundle.manifest.tensorrt, bundle.manifest.backend

    def open_backend(timed: Timed, entries: Mapping[str, str] | None) -> InferBackend:
        if record is not None:
            assert not isinstance(timed, Path)
            return tensorrt_model(bundle, record, timed)
        assert not isinstance(timed, LayerTimes)
        return OnnxRuntimeModel(
            bundle.engine_path,
            provider=backend.provider,
            plugins=bundle.plugin_paths,
            threads=threads,
            config=entries,
            profile=timed,
            options=backend.options,
        )

    return open_backend


def captured_sizes(manifest: Manifest, batches: Collection[int]) -> tuple[int, ...]:
    """Of the decode steps that ONNX Runtime on a GPU captures when it serves, those that these batches take."""
    if manifest.backend.provider == CPU or manifest.tensorrt is not None:
        return ()
    served = default_ladder(manifest, max(default_config(manifest).max_running, *batches))
    return tuple(sorted({next(size for size in served if size >= batch) for batch in batches}))
