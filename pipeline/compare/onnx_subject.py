"""An ONNX file as one side of a comparison, run by ONNX Runtime through Kiln's own backends.

A serving graph is recognised by the decoder description in its metadata. One that still carries the
attention operator as exported is bound to Kiln's kernel in a temporary copy of the graph; the weights
are linked, not copied, where the file system allows it.
"""

import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np

from engines.backends.onnxruntime import OnnxRuntimeDecoder, OnnxRuntimeModel
from engines.runtime.engine import Engine
from engines.runtime.info import EngineInfo
from engines.runtime.opening import default_kv_blocks
from passes.manager import link_weights
from passes.onnx_model import DecoderSpec, OnnxModel, load_structure, onnx_model_from_path
from pipeline.compare.engine_subject import EngineDecoder, EnginePlain, scheduling
from pipeline.compare.inputs import input_specs_from_graph
from pipeline.compare.machine import package_versions
from pipeline.compare.report import Side
from pipeline.compare.subjects import Subject
from pipeline.compare.tolerance import PRECISION_OF_DTYPE
from pipeline.cpu_form import needs_cpu_form, write_cpu_form
from pipeline.io_layout import permutations_from_path
from plugins.paged_attention.schema import DOMAIN, EXPORT_DOMAIN, OP_TYPE

_PRECISIONS = {1: "fp32", 10: "fp16", 16: "bf16"}  # onnx.TensorProto.DataType


def onnx_subject_from_path(path: Path, threads: int | None = None, max_running: int = 1) -> Subject:
    """Open an ONNX file to run so many texts at once. Raises KilnError for what is no ONNX model or cannot be run."""
    model = onnx_model_from_path(path)
    side = Side(
        kind="onnx",
        name=path.name,
        path=str(path),
        sha256=model.sha256,
        precision=_precision(path),
        cache=PRECISION_OF_DTYPE[model.decoder.kv.dtype] if model.decoder else None,
        versions=package_versions("onnxruntime"),
    )
    if model.decoder is not None:
        engine = _engine_from_graph(model, model.decoder, threads, max_running)
        return EngineDecoder(side, engine, model.decoder, encode=None)
    engine = Engine.from_model(OnnxRuntimeModel(path, threads=threads), EngineInfo(path.name, "model"))
    return EnginePlain(side, engine, input_specs_from_graph(path, model.inputs), permutations_from_path(path))


def _engine_from_graph(model: OnnxModel, spec: DecoderSpec, threads: int | None, max_running: int) -> Engine:
    from plugins.build import cpu_library

    with tempfile.TemporaryDirectory(prefix="kiln-compare-") as folder:
        bound = bound_graph(model.path, Path(folder))
        backend = OnnxRuntimeDecoder(
            bound, spec.kv, default_kv_blocks(spec, max_running), plugins=[cpu_library()], threads=threads
        )
    return Engine.from_decoder(
        backend, spec, config=scheduling(max_running), info=EngineInfo(model.path.name, "decoder")
    )


def bound_graph(path: Path, folder: Path) -> Path:
    """`path` itself if this machine's CPU runs it, else a copy in `folder`: bound, or in the CPU's form."""
    import onnx

    proto = load_structure(path)
    if needs_cpu_form(proto):
        return write_cpu_form(path, folder)
    exported = [node for node in proto.graph.node if node.op_type == OP_TYPE and node.domain == EXPORT_DOMAIN]
    if not exported:
        return path
    for node in exported:
        node.domain = DOMAIN
    proto.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    link_weights(path, folder)
    bound = folder / path.name
    bound.write_bytes(proto.SerializeToString())
    return bound


def _precision(path: Path) -> str:
    """The precision that most of the graph's floating-point weights have."""
    sizes: dict[str, int] = {}
    for initializer in load_structure(path).graph.initializer:
        with suppress(KeyError):
            name = _PRECISIONS[initializer.data_type]
            sizes[name] = sizes.get(name, 0) + int(np.prod(initializer.dims))
    return max(sizes, key=lambda name: sizes[name], default="fp32")
