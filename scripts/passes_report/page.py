"""docs/passes.md: what the passes are and what they did to real models, in Markdown."""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from passes.manager import LIMITS, Errors, PassReport
from passes.standard import TABLE, Backend, PassTarget, describe_passes
from passes_report.cases import Check
from passes_report.timing import MODES, Spread, Workload

_BACKENDS: tuple[Backend, ...] = ("cpu", "cuda", "tensorrt")
_NOTES = 3
_SHORT = 160


@dataclass
class ModelResult:
    """What was found on one model. `whole`: errors of all passes; `backend`: of ONNX Runtime's own rewrites."""

    name: str
    origin: str
    reports: Sequence[PassReport]
    whole: Errors
    backend: Errors
    checks: Sequence[Check]
    workloads: Sequence[Workload] = field(default_factory=list)


@dataclass(frozen=True)
class Pruned:
    """Cosines of embeddings before and after `share` of each feed-forward layer's channels went."""

    share: float
    cosines: Sequence[float]
    parameters: tuple[int, int]
    groups: int


@dataclass
class Results:
    """The whole page. `machine` in words; `skip_norms`: fused by ONNX Runtime, and apart."""

    command: str
    machine: str
    models: list[ModelResult] = field(default_factory=list)
    pruned: Pruned | None = None
    skip_norms: Mapping[str, tuple[Spread, Spread]] = field(default_factory=dict)


def page(results: Results) -> str:
    parts = [_introduction(results), _all_passes(), *map(_model, results.models)]
    if any(model.workloads for model in results.models):
        parts.append(_timings(results))
    parts.append(_layouts())
    if results.pruned:
        parts.append(_pruning(results.pruned))
    return "\n\n".join(parts) + "\n"


def _introduction(results: Results) -> str:
    exact, reorders, precision = (f"{LIMITS[effect]:.0e}" for effect in list(LIMITS)[:3])
    return f"""# Graph passes

A pass rewrites an ONNX graph in place: `build-engine` runs all of them on what it exports, `kiln optimize` on any ONNX
file. Each stands in a file of its own under `passes/`, whose docstring lists its rules; `passes/standard.py` has the
order. Every one has a switch, in both commands:

    kiln optimize model.onnx --out smaller.onnx                         # all that are on by default
    kiln optimize model.onnx --out smaller.onnx --disable fuse_gelu     # all but one
    kiln optimize model.onnx --out smaller.onnx --enable prune_structure --pass-option prune_structure.ffn=0.25
    kiln optimize model.onnx --out smaller.onnx --only fold_constants,remove_unused
    kiln optimize model.onnx --out smaller.onnx --measure --json        # times each pass as well
    kiln optimize --list

After each pass that changed something the model is run before and after it on the same inputs, with ONNX Runtime's own
rewrites off. *max error* is max |after - before| over all values of all outputs, *relative* is that over
max |before| of the output, *cosine* the smallest of any output. A pass is undone where the relative error exceeds the
limit of its effect: {exact} where it is exact, {reorders} where it reorders floating point, {precision} where
it changes precision; one that changes the model is only reported. For scale, each model also has what ONNX Runtime's
own rewrites change in its outputs. Nodes count over all subgraphs; constants are no nodes.

This page is made by

    {results.command}

on {results.machine}."""


def _all_passes() -> str:
    described = {backend: describe_passes(PassTarget(backend=backend)) for backend in _BACKENDS}
    modules = {entry.name: entry.make.__module__ for entry in reversed(TABLE)}
    runs = Counter(entry.name for entry in TABLE)
    again = ", ".join(f"`{name}`" for name, number in runs.items() if number > 1)
    rows = []
    for (name, effect, _), *per_backend in zip(described["cpu"], *described.values(), strict=True):
        summary = (sys.modules[modules[name]].__doc__ or "").splitlines()[0]
        rows.append([f"`{name}`", summary, effect, *("on" if default else "" for _, _, default in per_backend)])
    return "\n".join(
        [
            "## All passes, in order",
            "",
            "On by default for a plain model in FP32; `cast_precision` is on with `--precision fp16` or `bf16`,",
            f"`io_layout_nhwc` with `--io-layout nhwc`. These run once more, for what later passes leave: {again}.",
            "",
            *_table(["pass", "what it does", "effect", "CPU", "CUDA", "TensorRT"], rows),
        ]
    )


def _model(model: ModelResult) -> str:
    first, last = model.reports[0].nodes_before, model.reports[-1].nodes_after
    changed = [name for name in sorted({*first, *last}) if first.get(name, 0) != last.get(name, 0)]
    counts = [[f"`{name}`", str(first.get(name, 0)), str(last.get(name, 0))] for name in changed]
    counts.append(["all nodes", str(sum(first.values())), str(sum(last.values()))])
    idle = list(dict.fromkeys(f"`{report.name}`" for report in model.reports if not report.rewrites))
    active = [report for report in model.reports if report.rewrites]
    idle = [name for name in idle if name not in {f"`{report.name}`" for report in active}]
    checks = [[each.name, each.before, each.after, "yes" if each.passed else "**NO**"] for each in model.checks]
    return "\n".join(
        [
            f"## {model.name}",
            "",
            f"{model.origin[0].upper()}{model.origin[1:]}.",
            "",
            *_passes(active),
            "",
            f"All passes together: {_errors(model.whole)}. For scale, ONNX Runtime's own rewrites of the model before "
            f"all passes: {_errors(model.backend)}.",
            f"Nothing to do for {', '.join(idle)}.",
            "",
            *_table(["operator", "before", "after"], counts),
            "",
            *_table(["check", "before, or expected", "after", "holds"], checks),
        ]
    )


def _passes(reports: Sequence[PassReport]) -> list[str]:
    measured = any(report.timing for report in reports)
    rows = []
    for report in reports:
        nodes = f"{sum(report.nodes_before.values())} → {sum(report.nodes_after.values())}"
        errors = report.errors
        row = [f"`{report.name}`", str(report.rewrites), nodes, f"{report.seconds:.2f}"]
        row += [f"{errors.absolute:.1e}", f"{errors.relative:.1e}", _cosine(errors.cosine)] if errors else ["", "", ""]
        if measured:
            row.append(_pays(report))
        rows.append([*row, f"**rolled back: {report.rolled_back}**" if report.rolled_back else _short(report.notes)])
    heading = ["pass", "rewrites", "nodes", "seconds", "max error", "relative", "cosine"]
    return _table([*heading, *(["a run, ms: before → after"] if measured else []), "left alone, and why"], rows)


def _pays(report: PassReport) -> str:
    timing = report.timing
    if timing is None:
        return ""
    words = {True: "pays", False: "costs", None: "within noise"}[timing.pays]
    return f"{timing.before * 1e3:.2f} → {timing.after * 1e3:.2f}, {words}"


def _short(notes: Iterable[str]) -> str:
    """The most frequent notes, those that differ in names and numbers alone as one."""
    kinds = Counter(re.sub(r"'[^']*'", "'...'", note) for note in notes)
    words = [
        (text if len(text) <= _SHORT else f"{text[:_SHORT]}...") + (f" ({number} times)" if number > 1 else "")
        for text, number in kinds.most_common(_NOTES)
    ]
    if len(kinds) > _NOTES:
        words.append(f"{len(kinds) - _NOTES} more kinds of note")
    return "; ".join(words)


def _errors(errors: Errors) -> str:
    return f"max error {errors.absolute:.1e}, relative {errors.relative:.1e}, cosine {_cosine(errors.cosine)}"


def _cosine(value: float) -> str:
    return "1" if value > 1 - 1e-9 else f"{value:.9f}"


def _timings(results: Results) -> str:
    parts = [
        """## Times

All sessions of a table are open at once and take turns, in a new order each round, with equally many threads that rest
between runs (`session.force_spinning_stop`): median milliseconds of one run and its quartiles. "Before" is the
model before all passes, "after" the same model with all of them. Rows are ONNX Runtime's own rewrites, at the level
named; Kiln opens a graph at ORT_ENABLE_ALL without `SkipLayerNormFusion` and `BiasGeluFusion`. Compare the columns of
one row for the same session options, and the first row's "before" with the second row's "after" for what a user gets.
The last table gives floors: the products of a run at this machine's FP32 peak, or a step's weights at its read
bandwidth, measured in the same minute; and where the time goes after the passes."""
    ]
    floors = []
    for model in results.models:
        for work in model.workloads:
            title = f"{model.name}, {work.name}"
            rows = []
            for mode in MODES:
                before, after = work.times[mode, "before"], work.times[mode, "after"]
                rows.append([mode, _spread(before), _spread(after), f"{before.median / after.median:.2f}"])
            parts.append(
                "\n".join([f"### {title}", "", *_table(["rewrites", "before, ms", "after, ms", "gain"], rows)])
            )
            kiln = work.times["as Kiln opens it", "after"].median
            shares = ", ".join(f"{operator} {share:.0%}" for operator, share in work.shares.items())
            floors.append(
                [title, work.limit, f"{work.floor * 1e3:.2f}", f"{kiln * 1e3:.2f}", f"{work.floor / kiln:.0%}", shares]
            )
    heading = ["workload", "work", "floor, ms", "as Kiln opens it, ms", "of floor", "share of operators"]
    parts.append("\n".join(["### What is possible", "", *_table(heading, floors)]))
    if results.skip_norms:
        rows = [
            [name, _spread(fused, 1e6), _spread(apart, 1e6), f"{fused.median / apart.median:.2f}"]
            for name, (fused, apart) in results.skip_norms.items()
        ]
        text = (
            "Why Kiln leaves a residual and the norm of it apart on CPUs: ONNX Runtime's fused operator against the "
            "two, microseconds."
        )
        heading = ["norm", "fused, us", "apart, us", "fused / apart"]
        parts.append("\n".join(["### Residual and norm", "", text, "", *_table(heading, rows)]))
    return "\n\n".join(parts)


def _spread(spread: Spread, scale: float = 1e3) -> str:
    return f"{spread.median * scale:.2f} ({spread.low * scale:.2f} to {spread.high * scale:.2f})"


def _layouts() -> str:
    return """## Channels-last and INT8

`python scripts/bench_layout.py MODEL.onnx` measures layouts on a CPU; on EfficientNet-Lite0 at batch 1, on the machine
above: in FP32 ONNX Runtime's own blocking (NCHWc) wins, 7.8 ms against 11.9 ms for the best channels-last form and
34 ms unblocked, so `layout_nhwc` leaves FP32 graphs for CPUs alone. In INT8 convolutions run channels-last either way:
3.15 ms with ONNX Runtime's NhwcTransformer alone, 3.14 ms after `layout_nhwc`, 5.16 ms with neither. On an H200 the
CUDA provider's own channels-last layout gains 1.1 to 1.2 times from batch 8 on and nothing at batch 1:
[benchmarks/gpu.md](benchmarks/gpu.md)."""


def _pruning(pruned: Pruned) -> str:
    before, after = pruned.parameters
    cosines = sorted(pruned.cosines)
    mean = sum(cosines) / len(cosines)
    return f"""## Pruning

`prune_structure` is off by default, because it changes the model. MiniLM with {pruned.share:.0%} of the channels of
its {pruned.groups} feed-forward layers removed, those with the smallest weights, and no training afterwards:
{before:,} values become {after:,}, and the embeddings of {len(cosines)} texts have a cosine of {mean:.4f} with the
original's on average, {cosines[0]:.4f} at least. That is another model: training has to follow."""


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [heading, ["---"] * len(heading), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
