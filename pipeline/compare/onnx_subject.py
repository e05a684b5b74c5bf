"""An ONNX file as one side of a comparison, run by ONNX Runtime through Kiln's own backends.

A serving graph is recognised by the decoder description in its metadata. One that still carries the
attention operator as exported is bound to Kiln's kernel in a temporary copy of the graph; the weights
are linked, not copied, where the file system allows it.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engines.backends.onnxruntime import OnnxRuntimeDecoder, OnnxRuntimeModel
from passes.onnx_model import DecoderSpec, OnnxModel, external_files, load_structure, onnx_model_from_path
from pipeline.compare.inputs import input_specs_from_graph
from pipeline.compare.machine import package_versions
from pipeline.compare.paged_text import greedy_continuation, logits_of_text
from pipeline.compare.report import Side
from pipeline.compare.subjects import Subject
from plugins.paged_attention.schema import DOMAIN, EXPORT_DOMAIN, OP_TYPE

_PRECISIONS = {1: "fp32", 10: "fp16", 16: "bf16"}  # onnx.TensorProto.DataType


def onnx_subject_from_path(path: Path, threads: int | None = None) -> Subject:
    """Open an ONNX file. Raises KilnError for what is no ONNX model or cannot be run."""
    model = onnx_model_from_path(path)
    side = Side(
        kind="onnx",
        name=path.name,
        path=str(path),
        sha256=model.sha256,
        precision=_precision(path),
        versions=package_versions("onnxruntime"),
    )
    if model.decoder is None:
        return _OnnxPlain(side, model, threads)
    return _OnnxDecoder(side, model, model.decoder, threads)


class _OnnxPlain:
    def __init__(self, side: Side, model: OnnxModel, threads: int | None) -> None:
        tensors = [(tensor.name, tensor.dtype, tensor.shape) for tensor in model.inputs]
        self.side = side
        self.inputs = input_specs_from_graph(load_structure(model.path), tensors)
        self._backend = OnnxRuntimeModel(model.path, threads=threads)

    def infer(self, feeds: Mapping[str, NDArray]) -> dict[str, NDArray]:
        return self._backend.infer(feeds)

    def close(self) -> None:
        self._backend.close()


class _OnnxDecoder:
    def __init__(self, side: Side, model: OnnxModel, spec: DecoderSpec, threads: int | None) -> None:
        from plugins.build import cpu_library

        self.side = side
        self.vocab_size = spec.vocab_size
        self.max_context = spec.max_context
        self.encode = None
        blocks = -(-spec.max_context // spec.kv.block_size)
        with tempfile.TemporaryDirectory(prefix="kiln-compare-") as folder:
            bound = _bound_graph(model.path, Path(folder))
            self._backend = OnnxRuntimeDecoder(bound, spec.kv, blocks, plugins=[cpu_library()], threads=threads)

    def logits(self, token_ids: Sequence[int], chunk: int) -> Iterator[NDArray[np.float32]]:
        return logits_of_text(self._backend, token_ids, chunk)

    def generate_greedy(self, token_ids: Sequence[int], tokens: int) -> list[int]:
        return greedy_continuation(self._backend, token_ids, tokens)

    def close(self) -> None:
        self._backend.close()


def _bound_graph(path: Path, folder: Path) -> Path:
    """`path` itself if its attention is bound already, else a bound copy in `folder`."""
    import onnx

    proto = load_structure(path)
    exported = [node for node in proto.graph.node if node.op_type == OP_TYPE and node.domain == EXPORT_DOMAIN]
    if not exported:
        return path
    for node in exported:
        node.domain = DOMAIN
    proto.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    for source in external_files(path, proto):
        target = folder / source.relative_to(path.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError:  # another file system
            shutil.copyfile(source, target)
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
