"""What a TensorRT plan loses, as far as the times, kinds and types of its layers tell it."""

from collections.abc import Iterator, Mapping

from engines.backends.tensorrt.layers import EngineLayer
from pipeline.profile.analysis import OperatorTime, Phase
from pipeline.profile.waste import Waste

_SWITCHES = {
    "Float": "kiln tensorrt build --precision fp16 or bf16",
    "Half": "kiln tensorrt build --quant int8",
    "BFloat16": "kiln tensorrt build --quant int8",
}
"""By the type of a layer's constants, as TensorRT calls it: what halves their bits."""


def tensorrt_wastes(phase: Phase, layers: Mapping[str, EngineLayer]) -> Iterator[Waste]:
    """All of them, in no order; some may be of no seconds. `layers` go by name."""
    groups: dict[str, list[OperatorTime]] = {kind: [] for kind in _SWITCHES}
    for node in phase.operators:
        layer = layers.get(node.name)
        for kind in layer.constant_types[:1] if layer is not None else ():
            groups.setdefault(kind, []).append(node)
    for kind, switch in _SWITCHES.items():
        yield Waste(
            f"layers with constants of {kind}",
            sum(node.seconds for node in groups[kind]) / 2,
            f"{len(groups[kind])} layers; with half the bits they would take half as long at best",
            switch,
        )
    yield Waste(
        "the host",
        phase.host,
        "the device waits: scheduling, packing, choosing tokens and text, and bringing inputs and results over",
        "larger batches: kiln tensorrt build --max-running, or --max-batch for a model without a KV cache",
    )
