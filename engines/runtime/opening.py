"""From a bundle to what an engine is made of: backend, cache account, and how it is served unless somebody says."""

from collections.abc import Sequence
from pathlib import Path

from engines.backends.base import DecoderBackend, InferBackend
from engines.backends.cuda_decoder import CudaDecoder
from engines.backends.cuda_graphs import ladder_up_to
from engines.backends.cuda_launching import LaunchingCudaDecoder
from engines.backends.launching import LaunchingDecoder, samples
from engines.backends.onnxruntime import OnnxRuntimeDecoder, OnnxRuntimeModel
from engines.backends.ort_tensorrt import model_from_engine_cache
from engines.backends.tensorrt.layer_times import LayerTimes
from engines.backends.tensorrt.opening import decoder_from_plan, limits_of, model_from_plan
from engines.backends.tensorrt.runtime import TensorRtModel
from engines.bundle import EngineBundle
from engines.manifest import Manifest, TensorRtRecord
from engines.runtime.batch_queue import BatchingConfig
from engines.runtime.info import EngineInfo
from engines.runtime.kv_cache import KvCache
from engines.runtime.paged_kv import PagedKv
from engines.runtime.ring_kv import RingKv, ring_blocks
from engines.runtime.scheduler import SchedulerConfig
from engines.runtime.sequence import blocks_for
from engines.sku import host_memory, runs_code_of
from passes.onnx_model import DecoderSpec, Tensor
from plugins.abi import abi_hash
from plugins.cuda_runtime import PROVIDER as CUDA
from plugins.cuda_runtime import CudaRuntime
from plugins.errors import KilnError

_GPU_DEFAULTS = {"max_running": 128, "tokens_per_step": 2048}
"""A GPU needs more work at a time than a CPU does to be busy; `kiln tune` finds what suits it."""
_CACHE_SHARE = 4
"""The default cache takes at most one part in so many of the host's memory."""


def model_backend(bundle: EngineBundle, threads: int | None) -> InferBackend:
    """The bundle's engine of a model without a KV cache."""
    manifest = bundle.manifest
    if manifest.tensorrt is not None:
        if manifest.backend.name == "onnxruntime":
            record, inputs = manifest.tensorrt, [t.tensor for t in manifest.inputs]
            return model_from_engine_cache(bundle.engine_path, record.key, inputs, record.profiles, record.options)
        return tensorrt_model(bundle, manifest.tensorrt)
    return OnnxRuntimeModel(
        bundle.engine_path,
        provider=manifest.backend.provider,
        plugins=bundle.plugin_paths,
        threads=threads,
        options=manifest.backend.options,
    )


def decoder_backend(
    bundle: EngineBundle,
    decoder: DecoderSpec,
    config: SchedulerConfig,
    kv_blocks: int | None,
    swap_blocks: int,
    window: int | None,
    threads: int | None,
    ladder: Sequence[int] | None = None,
) -> DecoderBackend:
    """The bundle's engine with its cache: of `kv_blocks`, or with `window`, of a ring for each place.

    `ladder`: decode batch sizes that a GPU captures; None for those that `kiln tune` found, or the usual ones.
    """
    if bundle.manifest.tensorrt is not None:
        given = {"kv_blocks": kv_blocks, "swap_blocks": swap_blocks or None, "window": window}
        return tensorrt_decoder(bundle, bundle.manifest.tensorrt, decoder, config, given)
    if window is not None:
        if kv_blocks is not None or swap_blocks:
            raise KilnError(
                "the static cache is max_running rings of window tokens; leave out kv_blocks and swap_blocks"
            )
        kv_blocks = config.max_running * ring_blocks(window, config.tokens_per_step, decoder.kv.block_size)
    if bundle.manifest.backend.provider == CUDA:
        ladder = ladder or default_ladder(bundle.manifest, config.max_running)
        return cuda_decoder(bundle, decoder, config, kv_blocks, swap_blocks, window, ladder)
    if kv_blocks is None:
        kv_blocks = default_kv_blocks(decoder, config.max_running)
    kind = LaunchingDecoder if samples(output.name for output in bundle.manifest.outputs) else OnnxRuntimeDecoder
    return kind(
        bundle.engine_path,
        decoder.kv,
        kv_blocks,
        host_blocks=swap_blocks,
        window=window,
        provider=bundle.manifest.backend.provider,
        plugins=bundle.plugin_paths,
        threads=threads,
    )


def cuda_decoder(
    bundle: EngineBundle,
    decoder: DecoderSpec,
    config: SchedulerConfig,
    kv_blocks: int | None,
    swap_blocks: int,
    window: int | None,
    ladder: Sequence[int],
    profile: Path | None = None,
) -> CudaDecoder:
    """On the first CUDA device; without `kv_blocks` the cache takes what is left there, as far as it is of use.

    `profile` as for `CudaDecoder`.
    """
    runtime = CudaRuntime()
    built = bundle.manifest.sku
    if bundle.manifest.plugins and not runs_code_of(built.arch, runtime.arch):
        raise KilnError(
            f"{bundle.path} was built for {built.name} ({built.arch}), this machine's GPU is {runtime.name} "
            f"({runtime.arch}), which does not run that code; build it again with --sku for this GPU: kiln sku detect"
        )
    kind = LaunchingCudaDecoder if samples(output.name for output in bundle.manifest.outputs) else CudaDecoder
    return kind(
        bundle.engine_path,
        decoder.kv,
        kv_blocks,
        max_context=decoder.max_context,
        most_blocks=config.max_running * blocks_for(decoder.max_context, decoder.kv.block_size),
        host_blocks=swap_blocks,
        window=window,
        plugins=bundle.plugin_paths,
        ladder=ladder,
        options=bundle.manifest.backend.options,
        runtime=runtime,
        profile=profile,
    )


def tensorrt_model(bundle: EngineBundle, record: TensorRtRecord, times: LayerTimes | None = None) -> TensorRtModel:
    """A plan of a model without a KV cache; with `times` its layers are timed."""
    inputs, weights = _inputs_and_weights(bundle, record)
    return model_from_plan(bundle.engine_path, record.key, inputs, record.profiles, weights, times)


def _inputs_and_weights(bundle: EngineBundle, record: TensorRtRecord) -> tuple[list[Tensor], Path | None]:
    """Of a plan; the file of its weights where it was built without them."""
    inputs = [info.tensor for info in bundle.manifest.inputs]
    return inputs, None if record.weights is None else bundle.path / record.weights


def tensorrt_decoder(
    bundle: EngineBundle,
    record: TensorRtRecord,
    decoder: DecoderSpec,
    config: SchedulerConfig,
    given: dict[str, int | None],
    times: LayerTimes | None = None,
) -> DecoderBackend:
    """Sizes of the cache and of steps are in the plan's profiles, so that none of `given` may be.

    With `times` its layers are timed.
    """
    for name, value in given.items():
        if value is not None:
            raise KilnError(
                f"{name} is {value}, but a TensorRT plan has its cache fixed; build it anew, or leave it out"
            )
    running, tokens = limits_of(record.profiles)
    if config.max_running > running or config.tokens_per_step > tokens:
        raise KilnError(
            f"max_running is {config.max_running} and tokens_per_step {config.tokens_per_step}, but {bundle.path} was "
            f"built for at most {running} and {tokens}; build it anew with --max-running and --tokens-per-step"
        )
    assert record.attention is not None
    inputs, weights = _inputs_and_weights(bundle, record)
    return decoder_from_plan(
        bundle.engine_path, record.key, record.attention, inputs, record.profiles, decoder.kv, weights, times
    )


def kv_cache(backend: DecoderBackend, decoder: DecoderSpec, config: SchedulerConfig, window: int | None) -> KvCache:
    """The account of a backend's cache; of rings with `window`."""
    size = backend.kv.block_size
    if window is not None:
        return RingKv(config.max_running, window, config.tokens_per_step, decoder.max_context, size)
    return PagedKv(backend.num_blocks, size, host_blocks=backend.host_blocks, share_prefixes=config.share_prefixes)


def default_config(manifest: Manifest) -> SchedulerConfig:
    """What `kiln tune` wrote into the bundle; SchedulerConfig's own defaults for the rest."""
    if manifest.tensorrt is not None:
        running, tokens = limits_of(manifest.tensorrt.profiles)
        if manifest.tensorrt.attention == "plugin":
            return SchedulerConfig(running, tokens)
        return SchedulerConfig(running, tokens, headroom=0.0, share_prefixes=False)  # a row is a place: none is spare
    serving = manifest.serving
    tuned = {} if serving is None else {n: getattr(serving, n) for n in ("max_running", "tokens_per_step")}
    own = _GPU_DEFAULTS if manifest.backend.provider == CUDA else {}
    return SchedulerConfig(**{**own, **{name: value for name, value in tuned.items() if value is not None}})


def default_ladder(manifest: Manifest, max_running: int) -> tuple[int, ...]:
    """Decode batch sizes that a GPU captures, up to `max_running`."""
    measured = () if manifest.serving is None else tuple(manifest.serving.decode_steps)
    return (*(size for size in measured if size < max_running), max_running) if measured else ladder_up_to(max_running)


def default_batching(manifest: Manifest) -> BatchingConfig:
    """What `kiln tune` wrote into the bundle; BatchingConfig's own defaults for the rest."""
    tuned = None if manifest.serving is None else manifest.serving.max_batch
    return BatchingConfig() if tuned is None else BatchingConfig(max_batch=tuned)


def default_kv_blocks(decoder: DecoderSpec, max_running: int) -> int:
    """Blocks for `max_running` full contexts, but no more than a quarter of the host's memory holds."""
    fitting = host_memory() // _CACHE_SHARE // decoder.kv.bytes_per_block
    if fitting < 1:
        raise KilnError(
            f"one cache block takes {decoder.kv.bytes_per_block} bytes, more than a quarter of this machine's "
            f"{host_memory()}; use a machine with more memory, or give kv_blocks"
        )
    return min(max_running * blocks_for(decoder.max_context, decoder.kv.block_size), fitting)


def info_from_bundle(bundle: EngineBundle, name: str | None) -> EngineInfo:
    manifest = bundle.manifest
    return EngineInfo(
        name or manifest.name,
        "model" if manifest.decoder is None else "decoder",
        source=manifest.model.source,
        sha256=bundle.sha256,
        sku=manifest.sku.name,
        created=manifest.created,
        tokenizer=str(bundle.tokenizer_path) if bundle.tokenizer_path else None,
    )


def check_plugins(bundle: EngineBundle) -> None:
    """Raise KilnError for an operator library that was built for another Kiln."""
    for plugin in bundle.manifest.plugins:
        if plugin.abi_hash != abi_hash():
            raise KilnError(
                f"{bundle.path / plugin.file} implements {plugin.operator} with ABI {plugin.abi_hash[:12]}, this Kiln "
                f"expects {abi_hash()[:12]}; rebuild the bundle: build-engine {bundle.manifest.model.source}"
            )
