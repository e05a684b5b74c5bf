"""Models put together from two: above and below each cut, the nodes of one side or the other.

Every part's own tensors and weights get a prefix, so that nothing of one side is taken for the other's; the tensors of
the cuts, the inputs and the outputs keep their names. Weights in files are linked beside the new model.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import onnx

from passes.manager import link_or_copy
from passes.onnx_model import external_files
from pipeline.bisect.cuts import Cut, Side

Which = Literal["a", "b"]


def write_hybrid(sides: dict[Which, Side], cuts: Sequence[Cut], parts: Sequence[Which], folder: Path) -> Path:
    """The model whose part i, between the cuts i - 1 and i, is `parts[i]`'s. Returns its file in `folder`."""
    assert len(parts) == len(cuts) + 1
    model = onnx.ModelProto()
    model.CopyFrom(sides["a"].proto)
    for field in ("node", "initializer", "value_info", "sparse_initializer"):
        model.graph.ClearField(field)
    done: set[str] = set()
    upper: tuple[str, ...] = ()
    for number, which in enumerate(parts):
        side, cut = sides[which], cuts[number] if number < len(cuts) else None
        outputs = set(side.outputs if cut is None else cut.outputs) - done
        targets = (*(() if cut is None else cut.tensors), *outputs)
        nodes = sorted(side.above(targets, upper))
        kept = {*upper, *targets, *side.inputs}
        _add_part(model.graph, side, nodes, _prefixing(f"{which}{number}/", kept), f"{which}.")
        done |= outputs
        upper = () if cut is None else cut.tensors
    _take_opsets(model, sides)
    for which, side in sides.items():
        for file in external_files(side.path, side.proto):
            target = folder / f"{which}.{file.relative_to(side.path.parent).as_posix().replace('/', '.')}"
            if not target.exists():
                link_or_copy(file, target)
    path = folder / "hybrid.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def _prefixing(prefix: str, kept: set[str]) -> Callable[[str], str]:
    return lambda name: name if not name or name in kept else prefix + name


def _add_part(
    graph: onnx.GraphProto, side: Side, nodes: Sequence[int], rename: Callable[[str], str], data_prefix: str
) -> None:
    used: dict[str, None] = {}
    for index in nodes:
        node = graph.node.add()
        node.CopyFrom(side.nodes[index])
        _rename(node, rename)
        node.name = rename(node.name) if node.name else ""
        used |= dict.fromkeys(name for name in side.reads(index) if name in side.initializers)
    for name in used:
        tensor = graph.initializer.add()
        tensor.CopyFrom(side.initializers[name])
        tensor.name = rename(name)
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = data_prefix + entry.value.replace("/", ".")


def _rename(node: onnx.NodeProto, rename: Callable[[str], str]) -> None:
    """In bodies, too: a body's own names get the same prefix, so that they stay apart from the outer ones."""
    node.input[:] = [rename(name) for name in node.input]
    node.output[:] = [rename(name) for name in node.output]
    for attribute in node.attribute:
        for body in [attribute.g] if attribute.HasField("g") else list(attribute.graphs):
            for inner in body.node:
                _rename(inner, rename)
            for value in (*body.input, *body.output, *body.value_info, *body.initializer):
                value.name = rename(value.name)


def _take_opsets(model: onnx.ModelProto, sides: dict[Which, Side]) -> None:
    """Every domain of either side, at the higher version."""
    versions: dict[str, int] = {}
    for side in sides.values():
        for opset in side.proto.opset_import:
            versions[opset.domain] = max(versions.get(opset.domain, 0), opset.version)
    del model.opset_import[:]
    model.opset_import.extend(onnx.helper.make_opsetid(*item) for item in versions.items())
