"""What an engine on a GPU loses, with the switches that apply there."""

from collections.abc import Iterator
from dataclasses import replace

from engines.manifest import Manifest
from pipeline.operator_work import Arithmetic, CallWork
from pipeline.profile.analysis import OperatorTime, Phase
from pipeline.profile.roofline import Roofline
from pipeline.profile.waste import NO_SWITCH, Waste, below_roof, launching, seconds_saved, small_batch, unfused
from plugins.paged_attention.schema import OP_TYPE
from plugins.quant_matmul.cuda_schema import EQUAL_ROWS

_CPU_ONLY = ("layout_nhwc",)
"""Passes: the provider chooses the layout of a GPU's convolutions by itself."""


def gpu_wastes(phase: Phase, roofline: Roofline, manifest: Manifest) -> Iterator[Waste]:
    """All of them, in no order; some may be of no seconds."""
    yield from _products(phase, roofline, manifest)
    yield from _cache(phase, roofline, manifest)
    yield from small_batch(phase, roofline, manifest)
    yield from unfused(phase, manifest, _CPU_ONLY)
    yield from below_roof(phase, lambda operator, nodes: _switch_below_roof(operator, nodes, manifest))
    yield Waste(
        "the host",
        phase.host,
        "the device waits: scheduling, packing and text, or bringing inputs and results over, take longer than it does",
        "kiln tune for larger steps",
    )
    yield launching(phase, "there are pauses between their kernels")


def bits_of_weights(work: CallWork) -> float:
    """Of one element of the constants that a product reads: its operations say how many elements there are."""
    return 16.0 * work.weights * work.rows / work.operations


def _products(phase: Phase, roofline: Roofline, manifest: Manifest) -> Iterator[Waste]:
    """Products with constants, by the bits of those: fewer are read in less time, and multiplied in less."""
    nodes = [node for node in phase.operators if node.work.is_product and node.work.weights]
    groups: dict[str, list[OperatorTime]] = {"FP32": [], "16 bits": [], "8 bits": []}
    for node in nodes:
        bits = bits_of_weights(node.work)
        if bits > 6:
            groups["8 bits" if bits < 12 else "16 bits" if bits < 24 else "FP32"].append(node)
    eight = "int8 or fp8" if "float8" in roofline.products else "int8"
    switches = {
        "FP32": "build-engine --precision fp16 or bf16",
        "16 bits": "build-engine --quantise-ends" if manifest.quantization else f"build-engine --quant {eight}",
        "8 bits": "build-engine --quant int4",
    }
    for width, group in groups.items():
        if width != "FP32" and manifest.decoder is None:
            continue  # quantised products on a GPU are those of decoders
        read = sum(node.work.weights for node in group)
        yield Waste(
            f"products with weights of {width}",
            seconds_saved(group, phase, roofline, lambda work, width=width: _narrower(work, width)),  # type: ignore[misc]
            f"{read / 2**20:.0f} MiB of weights are read in each pass, and multiplied in {_arithmetics(group)}",
            switches[width],
        )


def _narrower(work: CallWork, width: str) -> CallWork:
    """With weights of half the bits; of more than a few rows the product is in those bits, too, but for int4."""
    arithmetic: Arithmetic = work.arithmetic
    if width == "FP32":
        return replace(work, arithmetic="16-bit", weights=work.weights // 2, activations=work.activations // 2)
    if width == "16 bits" and work.rows > EQUAL_ROWS:
        arithmetic = "int8"
    return replace(work, arithmetic="16-bit" if width == "8 bits" else arithmetic, weights=work.weights // 2)


def _arithmetics(nodes: list[OperatorTime]) -> str:
    return " and ".join(sorted({node.work.arithmetic for node in nodes})) or "nothing"


def _cache(phase: Phase, roofline: Roofline, manifest: Manifest) -> Iterator[Waste]:
    if manifest.decoder is None or "int8" in manifest.decoder.kv.dtypes:
        return
    nodes = [node for node in phase.operators if node.operator == OP_TYPE]
    yield Waste(
        f"a cache of {manifest.decoder.kv.dtypes[0]}",
        seconds_saved(nodes, phase, roofline, lambda work: replace(work, cache=work.cache // 2)),
        "attention is limited by reading keys and values",
        "build-engine --kv-cache int8-kv",
    )


def _switch_below_roof(operator: str, nodes: list[OperatorTime], manifest: Manifest) -> str:
    """Which kernels multiply how many rows is measured on the machine, once."""
    tuned = manifest.decoder is None or manifest.serving is not None
    products = operator != OP_TYPE and any(node.work.is_product for node in nodes)
    return NO_SWITCH if tuned or not products else "kiln tune, which measures which kernels multiply how many rows"
