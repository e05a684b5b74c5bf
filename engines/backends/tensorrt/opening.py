"""From a bundle's plan to a running model: what this machine is, asked before the plan is read."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engines.backends.tensorrt.api import Attention, tensorrt_module
from engines.backends.tensorrt.decoders import TensorRtLinearGraph, TensorRtPagedDecoder
from engines.backends.tensorrt.key import EngineKey
from engines.backends.tensorrt.layer_times import LayerTimes
from engines.backends.tensorrt.linear_decoder import LinearDecoder
from engines.backends.tensorrt.loading import open_engine
from engines.backends.tensorrt.profiles import Profile
from engines.backends.tensorrt.runtime import TensorRtModel
from engines.sku import sku_table
from engines.sku_detect import match_gpu, own_gpus
from passes.onnx_model import Tensor
from plugins.abi import abi_hash
from plugins.cuda_runtime import CudaRuntime
from plugins.errors import KilnError
from plugins.paged_attention.schema import KvSpec


def machine_key(built: EngineKey, version: str | None = None) -> EngineKey:
    """The same engine's key as this machine would build it; `version` None asks the TensorRT that is installed.

    Raises KilnError without GPU, driver or TensorRT.
    """
    gpus = own_gpus()
    if not gpus:
        raise KilnError(f"this machine has no GPU; the engine was built for SKU {built.sku} ({built.arch})")
    match = match_gpu(gpus[0], sku_table())
    return replace(
        built,
        tensorrt=version or tensorrt_module(built.product).__version__,
        sku=match.sku.name if match.sku is not None else gpus[0].name,
        arch=gpus[0].arch or (match.sku.arch if match.sku is not None else "unknown"),
        driver=gpus[0].driver,
        plugin_abi=None if built.plugin_abi is None else abi_hash(),
    )


def limits_of(profiles: Sequence[Profile]) -> tuple[int, int]:
    """Sequences and tokens of one step that a decoder's engine takes, whatever the step consists of."""
    decode, chunk = profiles[0].symbols, profiles[1].symbols
    running = decode["seqs"].most
    return running, chunk["tokens"].most if "tokens" in chunk else max(chunk["step"].most, running)


def model_from_plan(
    plan: Path,
    built: EngineKey,
    inputs: Sequence[Tensor],
    profiles: Sequence[Profile],
    weights: Path | None = None,
    times: LayerTimes | None = None,
) -> TensorRtModel:
    """Open a plan that was built for this machine. Raises KilnError naming both sides where it was not.

    With `times` its layers are timed, see `EngineRunner`.
    """
    opened = open_engine(plan, built, machine_key(built), weights=weights, product=built.product)
    return TensorRtModel(opened, inputs, profiles, CudaRuntime(), times)


def decoder_from_plan(
    plan: Path,
    built: EngineKey,
    attention: Attention,
    inputs: Sequence[Tensor],
    profiles: Sequence[Profile],
    kv: KvSpec,
    weights: Path | None = None,
    times: LayerTimes | None = None,
) -> TensorRtPagedDecoder | LinearDecoder:
    """The same for a decoder, whose cache is as large as its profiles say."""
    opened = open_engine(plan, built, machine_key(built), weights=weights, product=built.product)
    runtime = CudaRuntime()
    if attention == "plugin":
        return TensorRtPagedDecoder(opened, inputs, profiles, runtime, kv, times)
    graph = TensorRtLinearGraph(opened, inputs, profiles, runtime, kv, times)
    return LinearDecoder(graph, kv, graph.rows)
