"""INT8 for TensorRT: the float passes, calibration and plan of `pipeline.quantize`, Q and D where TensorRT fuses them.

Every layer that TensorRT has in 8 bits is chosen, but the first and the last: what saves time there cannot be measured
on this machine. Whether the result is accurate enough is `kiln compare`'s to say.
"""

from collections.abc import Sequence
from pathlib import Path

from engines.runtime.tokenizer import Tokenizer
from engines.sku import Sku
from passes.manager import PassReport
from passes.onnx_model import OnnxModel
from passes.standard import FLOAT_TABLE
from pipeline.optimize import OptimizeConfig, optimize, target_for
from pipeline.progress import Progress
from pipeline.quantize.building import rewritten
from pipeline.quantize.config import QuantizeConfig
from pipeline.quantize.stage import quantisation_for
from plugins.errors import KilnError

SCHEME = "w8a8"
"""Weights and activations in INT8 with fixed ranges: the only one of `--quant int8` that TensorRT multiplies in."""


def refuse_quantised_decoder(name: str) -> None:
    """Raise KilnError: fixed ranges of activations are no way to serve a decoder, and nothing here could tell."""
    raise KilnError(
        f"{name} is a decoder, and TensorRT has INT8 with fixed ranges of activations only, which rounds SmolLM2's so "
        "that attention in 16 bits instead of 32 changes its logits by half of the largest: leave --quant out, and "
        "take --precision fp16"
    )


def quantised_for_tensorrt(
    source: OnnxModel,
    target: Path,
    sku: Sku,
    passes: OptimizeConfig,
    config: QuantizeConfig,
    tokenizer: Path | None,
    progress: Progress,
) -> tuple[OnnxModel, Sequence[PassReport]]:
    """Write the quantised graph of a model without a KV cache.

    Raises KilnError for data that does not suit the model, and where nothing is left to quantise.
    """
    assert source.decoder is None
    work = target.parent / "quantise"
    work.mkdir()
    with progress.stage("graph passes"):
        floats, reports = optimize(source, work / "float.onnx", sku, passes, table=FLOAT_TABLE)
    known = None if tokenizer is None else Tokenizer(tokenizer)
    found = quantisation_for(floats, [], known, target_for(floats, sku, passes), config, work, progress)
    chosen = sum(layer.scheme != "float" for layer in found.plan.layers.values())
    progress.note(f"{chosen} of {len(found.layers)} layers in INT8; kiln compare tells what that costs in accuracy")
    with progress.stage("quantise"):
        made, more = rewritten(floats, target, found, sku, passes)
    return made, (*reports, *more)
