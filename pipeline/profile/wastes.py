"""Where a phase loses most, and which of Kiln's switches addresses it.

Each waste has the seconds of a pass that removing it could save at best, by the roofline; wastes overlap, so their
seconds do not add up. What no switch addresses is said to be so.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from engines.manifest import Manifest
from pipeline.operator_work import CallWork
from pipeline.profile.analysis import TWICE_THE_BATCH, OperatorTime, Phase, seconds_if
from pipeline.profile.roofline import Roofline
from plugins.paged_attention.schema import OP_TYPE
from plugins.quant_matmul.schema import INT8_MATMUL, WEIGHT_MATMUL

SHOWN = 3
_LEAST_SHARE = 0.01
"""Of a pass: less is not worth a switch."""
_NO_SWITCH = "none: it is a matter of the kernel"
_PACKED = {INT8_MATMUL.op_type, WEIGHT_MATMUL.op_type}
_FUSIONS: dict[str, tuple[str, ...]] = {
    "fuse_layer_norm": ("ReduceMean", "Pow", "Sqrt", "LayerNormalization"),
    "fuse_rms_norm": ("ReduceMean", "Pow", "Sqrt", "Reciprocal"),
    "bind_add_rms_norm": ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"),
    "fuse_gelu": ("Erf", "Tanh"),
    "fuse_swiglu": ("Sigmoid", "QuickGelu"),
    "fuse_rope": ("Sin", "Cos", "Neg", "Concat", "Slice"),
    "fuse_attention": ("Softmax",),
    "fold_batch_norm": ("BatchNormalization",),
    "fold_constants": ("Shape", "ConstantOfShape", "Expand", "Range"),
    "layout_nhwc": ("Transpose", "ReorderInput", "ReorderOutput"),
    "fuse_qdq": ("QuantizeLinear", "DequantizeLinear"),
}
"""Pass to the operators that it removes where they stand in its pattern."""


@dataclass(frozen=True)
class Waste:
    """`seconds` of a pass at best; `switch` is what to type."""

    name: str
    seconds: float
    why: str
    switch: str


def wastes_from_phase(phase: Phase, roofline: Roofline, manifest: Manifest, threads: int) -> list[Waste]:
    """The largest first; those of less than 1 % of a pass are left out."""
    found = [
        *_weights(phase, roofline),
        *_cache(phase, roofline, manifest),
        *_integer_products(phase, roofline),
        *_batch(phase, roofline, manifest),
        *_unfused(phase, manifest),
        *_below_roof(phase, threads),
        *_outside(phase),
    ]
    return sorted(
        (waste for waste in found if waste.seconds >= _LEAST_SHARE * phase.accounted), key=lambda w: -w.seconds
    )


def _saved(
    nodes: Sequence[OperatorTime], phase: Phase, roofline: Roofline, change: Callable[[CallWork], CallWork]
) -> float:
    """Seconds that these nodes would save if their work changed, at an unchanged distance from the roof."""
    return sum(
        node.seconds * (1 - min(roofline.best(change(node.work), phase.streamed) / node.best, 1))
        for node in nodes
        if node.best and node.bound != "launch"
    )


def _weights(phase: Phase, roofline: Roofline) -> Iterator[Waste]:
    for packed, share, width, quant in ((False, 1 / 4, "FP32", "int8"), (True, 1 / 2, "INT8", "int4")):
        nodes = [
            node
            for node in phase.operators
            if node.work.is_product and node.work.weights and (node.operator in _PACKED) == packed
        ]
        seconds = _saved(nodes, phase, roofline, lambda w, share=share: replace(w, weights=round(w.weights * share)))  # type: ignore[misc]
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
        seconds = _saved(nodes, phase, roofline, lambda work: replace(work, cache=work.cache // 2))
        yield Waste(f"a cache of {types[0]}", seconds, "attention is limited by reading keys and values", switch)


def _integer_products(phase: Phase, roofline: Roofline) -> Iterator[Waste]:
    nodes = [node for node in phase.operators if node.work.is_product and node.work.arithmetic == "fp32"]
    dense = [node for node in nodes if node.operator != OP_TYPE]
    seconds = _saved(dense, phase, roofline, lambda w: replace(w, arithmetic="int8", weights=w.weights // 4))
    yield Waste(
        "FP32 arithmetic",
        seconds,
        f"products of integers are {_ratio(dense, roofline):.1f} times as fast here",
        "build-engine --quant w8a8",
    )


def _ratio(nodes: Sequence[OperatorTime], roofline: Roofline) -> float:
    rows = max((node.work.rows for node in nodes), default=1)
    return roofline.product_rate("int8", rows) / roofline.product_rate("fp32", rows)


def _batch(phase: Phase, roofline: Roofline, manifest: Manifest) -> Iterator[Waste]:
    if phase.name.startswith("prefill"):
        return
    doubled = seconds_if(phase, roofline, TWICE_THE_BATCH)
    decoder = manifest.decoder is not None
    yield Waste(
        "a small batch",
        phase.accounted - doubled / 2,
        f"with twice as many {'sequences' if decoder else 'samples'} a pass would take {doubled / phase.accounted:.2f} "
        "times as long",
        "kiln tune, and kiln serve --max-running where as many requests come together" if decoder else "kiln tune",
    )


def _unfused(phase: Phase, manifest: Manifest) -> Iterator[Waste]:
    ran = {record.name: record for record in manifest.passes}
    for name, operators in _FUSIONS.items():
        nodes = [node for node in phase.operators if node.operator in operators]
        record = ran.get(name)
        if not nodes:
            continue
        if record is None:
            switch = f"build-engine --enable {name}"
        elif record.rolled_back is not None:
            switch = f"build-engine --pass-option, or a report: {name} was rolled back ({record.rolled_back})"
        else:
            switch = f"kiln optimize --verbose says why {name} left them"
        kinds = ", ".join(sorted({node.operator for node in nodes}))
        seconds = sum(node.seconds for node in nodes)
        yield Waste(f"operators of their own: {kinds}", seconds, f"{len(nodes)} that {name} looks for", switch)


def _below_roof(phase: Phase, threads: int) -> Iterator[Waste]:
    from plugins.measure import usable_cpus

    groups: dict[str, list[OperatorTime]] = {}
    for node in phase.operators:
        if node.bound != "launch":
            groups.setdefault(node.operator, []).append(node)
    more = usable_cpus()
    switch = f"--threads {more}" if threads < more else _NO_SWITCH
    for operator, nodes in groups.items():
        seconds, best = sum(node.seconds for node in nodes), sum(node.best for node in nodes)
        bound = max(nodes, key=lambda node: node.seconds).bound
        where = switch
        if operator == OP_TYPE and bound == "compute":
            where = "build-engine --attention bf16, for prompts"
        why = f"they take {seconds / best:.1f} times the roofline's least" if best else "they do nothing"
        yield Waste(f"{operator} below the roof", seconds - best, why, where)


def _outside(phase: Phase) -> Iterator[Waste]:
    launches = [node for node in phase.operators if node.bound == "launch"]
    yield Waste(
        "the host",
        phase.host,
        "scheduling, packing, choosing tokens and text are done while no operator runs",
        "kiln tune for a larger batch, or kiln serve --speculate for fewer steps",
    )
    yield Waste(
        "launching operators",
        phase.dispatch + sum(node.seconds for node in launches),
        f"{len(phase.operators)} operators are started one by one, {len(launches)} of them with next to no work",
        "graph passes (kiln optimize --list), or a larger batch (kiln tune)",
    )
