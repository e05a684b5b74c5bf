"""Runs the graph passes of a SKU over an ONNX file."""

import os
import shutil
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import onnx_graphsurgeon as gs

from engines.manifest import PassRecord
from engines.sku import Sku
from passes.base import Pass
from passes.bind_attention import BindAttention
from passes.onnx_model import OnnxModel, external_files, load_structure, onnx_model_from_path
from plugins.errors import KilnError

if TYPE_CHECKING:
    import onnx


def passes_for_sku(sku: Sku) -> list[Pass]:
    """The passes that an engine for `sku` needs, in order."""
    return [BindAttention()] if sku.is_cpu else []


def _graph_from_proto(path: Path, proto: "onnx.ModelProto") -> gs.Graph:
    try:
        return gs.import_onnx(proto)
    except Exception as error:  # a graph that is damaged, but not so that protobuf notices
        raise KilnError(
            f"{path}: its graph cannot be read ({type(error).__name__}: {error}); export it again"
        ) from error


def optimize(model: OnnxModel, target: Path, sku: Sku) -> tuple[OnnxModel, tuple[PassRecord, ...]]:
    """Rewrite the graph into `target`; external weights are linked beside it, or copied where links cannot be."""
    import onnx

    proto = load_structure(model.path)
    weights = external_files(model.path, proto)
    graph = _graph_from_proto(model.path, proto)
    records = []
    for graph_pass in passes_for_sku(sku):
        start = perf_counter()
        changed = graph_pass.call(graph).changed
        records.append(PassRecord(name=graph_pass.name, changed=changed, seconds=perf_counter() - start))
    if any(record.changed for record in records):
        rewritten = gs.export_onnx(graph, do_type_check=False)
        onnx.helper.set_model_props(rewritten, {entry.key: entry.value for entry in proto.metadata_props})
        proto = rewritten
    target.write_bytes(proto.SerializeToString())
    for file in weights:
        placed = target.parent / file.relative_to(model.path.parent)
        placed.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, placed)
        except OSError:
            shutil.copyfile(file, placed)
    return onnx_model_from_path(target), tuple(records)
