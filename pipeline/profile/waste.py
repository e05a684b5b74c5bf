"""One waste, and those that are looked for in the same way on every kind of machine."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from engines.manifest import Manifest
from pipeline.operator_work import CallWork
from pipeline.profile.analysis import TWICE_THE_BATCH, OperatorTime, Phase, seconds_if
from pipeline.profile.roofline import Roofline

NO_SWITCH = "none: it is a matter of the kernel"
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


def seconds_saved(
    nodes: Sequence[OperatorTime], phase: Phase, roofline: Roofline, change: Callable[[CallWork], CallWork]
) -> float:
    """Seconds that these nodes would save if their work changed, at an unchanged distance from the roof."""
    return sum(
        node.seconds * (1 - min(roofline.best(change(node.work), phase.streamed) / node.best, 1))
        for node in nodes
        if node.best and node.bound != "launch"
    )


def small_batch(phase: Phase, roofline: Roofline, manifest: Manifest) -> Iterator[Waste]:
    """What a pass of twice as many would save of each."""
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


def unfused(phase: Phase, manifest: Manifest, without: Collection[str] = ()) -> Iterator[Waste]:
    """Operators that a graph pass removes; `without` passes that this machine's graphs do not take."""
    ran = {record.name: record for record in manifest.passes}
    for name, operators in _FUSIONS.items():
        nodes = [node for node in phase.operators if node.operator in operators]
        record = ran.get(name)
        if not nodes or name in without:
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


def below_roof(phase: Phase, switch_of: Callable[[str, list[OperatorTime]], str]) -> Iterator[Waste]:
    """Operators that take longer than the roofline's least; the switch depends on the operator and its nodes."""
    groups: dict[str, list[OperatorTime]] = {}
    for node in phase.operators:
        if node.bound != "launch":
            groups.setdefault(node.operator, []).append(node)
    for operator, nodes in groups.items():
        seconds, best = sum(node.seconds for node in nodes), sum(node.best for node in nodes)
        why = f"they take {seconds / best:.1f} times the roofline's least" if best else "they do nothing"
        yield Waste(f"{operator} below the roof", seconds - best, why, switch_of(operator, nodes))


def launching(phase: Phase, how: str) -> Waste:
    """The time in no operator, which is lost by `how` they are started, and that of those with nothing to do."""
    launches = [node for node in phase.operators if node.bound == "launch"]
    return Waste(
        "launching operators",
        phase.dispatch + sum(node.seconds for node in launches),
        f"{how}, and {len(launches)} of {len(phase.operators)} have next to no work",
        "graph passes (kiln optimize --list), or a larger batch (kiln tune)",
    )
