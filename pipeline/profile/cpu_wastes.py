"""What an engine on a CPU loses, with the switches that apply there."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from engines.manifest import Manifest
from pipeline.profile.analysis import OperatorTime, Phase
from pipeline.profile.roofline import Roofline
from pipeline.profile.waste import NO_SWITCH, Waste, below_roof, launching, seconds_saved, small_batch, unfused
from plugins.measure import usable_cpus
from plugins.paged_attention.schema import OP_TYPE
from plugins.quant_matmul.schema import INT8_MATMUL, WEIGHT_MATMUL

_PACKED = {INT8_MATMUL.op_type, WEIGHT_MATMUL.op_type}


def cpu_wastes(phase: Phase, roofline: Roofline, manifest: Manifest, threads: int) -> Iterator[Waste]:
    """All of them, in no order; some may be of no seconds."""
    yield from _weights(phase, roofline)
    yield from _cache(phase, roofline, manifest)
    yield _integer_products(phase, roofline)
    yield from small_batch(phase, roofline, manifest)
    yield from unfused(phase, manifest)
    yield from _below_roof(phase, threads)
    yield Waste(
        "the host",
        phase.host,
        "scheduling, packing, choosing tokens and text are done while no operator runs",
        "kiln tune for a larger batch, or kiln serve --speculate for fewer steps",
    )
    yield launching(phase, "operators are started one by one")


def _weights(phase: Phase, roofline: Roofline) -> Iterator[Waste]:
    for packed, share, width, quant in ((False, 1 / 4, "FP32", "int8"), (True, 1 / 2, "INT8", "int4")):
        nodes = [
            node
            for node in phase.operators
            if node.work.is_product and node.work.weights and (node.operator in _PACKED) == packed
        ]
        seconds = seconds_saved(
            nodes,
            phase,
            roofline,
            lambda w, share=share: replace(w, weights=round(w.weights * share)),  # type: ignore[misc]
        )
        read = sum(node.work.weights for node in nodes)
        yield Waste(
            f"{width} weights",
            seconds,
            f"{read / 2**20:.0f} MiB of them are read in each pass, and reading is what limits their products",
            f"build-engine --quant {quant}",
        )


def _cache(phase: Phase, roofline: Roofline, manifest: Manifest) -> Iterator[Waste]:
    if manifest.decoder is None:
        return
    nodes = [node for node in phase.operators if node.operator == OP_TYPE]
    types = manifest.decoder.kv.dtypes
    switch = "build-engine --kv-dtype float16" if "float32" in types else "build-engine --kv-cache int8-kv"
    if "int8" not in types:
        seconds = seconds_saved(nodes, phase, roofline, lambda work: replace(work, cache=work.cache // 2))
        yield Waste(f"a cache of {types[0]}", seconds, "attention is limited by reading keys and values", switch)


def _integer_products(phase: Phase, roofline: Roofline) -> Waste:
    nodes = [node for node in phase.operators if node.work.is_product and node.work.arithmetic == "fp32"]
    dense = [node for node in nodes if node.operator != OP_TYPE]
    seconds = seconds_saved(dense, phase, roofline, lambda w: replace(w, arithmetic="int8", weights=w.weights // 4))
    return Waste(
        "FP32 arithmetic",
        seconds,
        f"products of integers are {_ratio(dense, roofline):.1f} times as fast here",
        "build-engine --quant w8a8",
    )


def _ratio(nodes: Sequence[OperatorTime], roofline: Roofline) -> float:
    rows = max((node.work.rows for node in nodes), default=1)
    return roofline.product_rate("int8", rows) / roofline.product_rate("fp32", rows)


def _below_roof(phase: Phase, threads: int) -> Iterator[Waste]:
    more = usable_cpus()
    switch = f"--threads {more}" if threads < more else NO_SWITCH

    def switch_of(operator: str, nodes: list[OperatorTime]) -> str:
        bound = max(nodes, key=lambda node: node.seconds).bound
        return "build-engine --attention bf16, for prompts" if operator == OP_TYPE and bound == "compute" else switch

    return below_roof(phase, switch_of)
