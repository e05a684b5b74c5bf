"""Constants whose values lie in files: read when asked for, moved into a file when new. Knows no operators.

A model larger than 2 GB is so never in memory as a whole, nor in one protobuf message.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter, dtype_to_onnx
from onnx_graphsurgeon.ir.tensor import LazyValues, SparseValues

from passes.scopes import scopes
from plugins.errors import KilnError

INLINE_LIMIT = 1024
"""Bytes up to which a constant is kept in the graph itself: shape arithmetic needs those values at hand."""


_ALIGNMENT = 4096
"""Offsets in a data file are multiples of a page, so that runtimes can map the weights."""


_SUB_BYTE = {
    onnx.TensorProto.INT4,
    onnx.TensorProto.UINT4,
    onnx.TensorProto.FLOAT4E2M1,
    onnx.TensorProto.INT2,
    onnx.TensorProto.UINT2,
}


class FileValues(LazyValues):
    """Values of a constant that lie in a file; the tensor's location is relative to `folder`."""

    def __init__(self, tensor: onnx.TensorProto, folder: Path) -> None:
        super().__init__(tensor)
        self.folder = folder

    @property
    def place(self) -> tuple[str, int, int]:
        """Location, offset and length in bytes."""
        entries = {entry.key: entry.value for entry in self.tensor.external_data}
        offset = int(entries.get("offset", 0))
        size = (self.folder / entries["location"]).stat().st_size
        return entries["location"], offset, int(entries.get("length", size - offset))

    def load(self) -> NDArray:
        # Not through onnx's own reader, which refuses a file that has another name as well (a hard link).
        kind = self.tensor.data_type
        if kind in _SUB_BYTE:
            packed = onnx.TensorProto(data_type=kind, dims=self.tensor.dims, raw_data=bytes(self.mapped()))
            return np.asarray(onnx.numpy_helper.to_array(packed))
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind)
        return np.frombuffer(self.mapped(), dtype).reshape(tuple(self.tensor.dims))

    def mapped(self) -> memoryview:
        """The raw bytes, mapped."""
        location, offset, length = self.place
        if length == 0:
            return memoryview(b"")
        return np.memmap(self.folder / location, np.uint8, "r", offset, (length,)).data


def spill(graph: gs.Graph, file: Path) -> None:
    """Move constants above INLINE_LIMIT that are in memory into `file`, which is created if there are any."""
    _store([t for t in constants_of(graph) if _in_memory(t)], file)


def consolidate(graph: gs.Graph, file: Path) -> None:
    """Put every constant above INLINE_LIMIT into one new `file`, each once; constants then refer to it."""
    _store([t for t in constants_of(graph) if _in_memory(t) or isinstance(t._values, FileValues)], file)


def inline(graph: gs.Graph) -> None:
    """Read every constant into memory, for a model that is to be one file."""
    for tensor in constants_of(graph):
        if isinstance(tensor._values, FileValues):
            tensor._values = tensor._values.load()


def data_files(graph: gs.Graph) -> dict[Path, int]:
    """The files that constants lie in, each with the bytes of it that are in use."""
    used: dict[Path, dict[int, int]] = {}
    for tensor in constants_of(graph):
        if isinstance(tensor._values, FileValues):
            location, offset, length = tensor._values.place
            used.setdefault(tensor._values.folder / location, {})[offset] = length
    return {file: sum(places.values()) for file, places in used.items()}


@contextmanager
def weights_apart(graph: gs.Graph) -> Iterator[None]:
    """Let large constants in memory look as if they were in a file, so that only the structure is copied."""
    kept = [(tensor, tensor._values) for tensor in constants_of(graph) if _in_memory(tensor)]
    try:
        for tensor, values in kept:
            stub = onnx.TensorProto(data_type=dtype_to_onnx(tensor.export_dtype), dims=values.shape)
            tensor._values = LazyValues(_external(stub, tensor.name, "none", 0, values.nbytes))
        yield
    finally:
        for tensor, values in kept:
            tensor._values = values


def place(tensor: gs.Constant, folder: Path) -> None:
    """Tell a constant with external data where it lies; small ones are read at once."""
    values = tensor._values
    if type(values) is not LazyValues or values.tensor.data_location != onnx.TensorProto.EXTERNAL:
        return
    placed = FileValues(values.tensor, folder)
    location, offset, length = placed.place
    size = (folder / location).stat().st_size
    if offset + length > size or length < placed.nbytes // (2 if placed.nbytes else 1):
        raise KilnError(
            f"initialiser '{tensor.name}' needs bytes {offset} to {offset + max(length, placed.nbytes)} of external "
            f"data file '{location}', which has {size}: it is truncated or another model's; copy or export it again"
        )
    tensor._values = placed.load() if placed.nbytes <= INLINE_LIMIT else placed
    tensor.data_location = None


def _store(constants: list[gs.Constant], file: Path) -> None:
    if not constants:
        return
    written: dict[tuple[str, int, int], tuple[int, int]] = {}
    with file.open("xb") as stream:  # never over a file that exists: it may be another name of somebody's weights
        for tensor in constants:
            if isinstance(tensor._values, FileValues):
                key = tensor._values.place
                proto, content = tensor._values.tensor, tensor._values.mapped()
            else:
                proto = OnnxExporter.export_tensor_proto(tensor)
                key, content = ("", id(tensor), 0), memoryview(_raw_bytes(proto))
            if key not in written:
                stream.write(b"\0" * (-stream.tell() % _ALIGNMENT))
                written[key] = (stream.tell(), len(content))
                stream.write(content)
            tensor._values = FileValues(_external(proto, tensor.name, file.name, *written[key]), file.parent)
        stream.flush()
        os.fsync(stream.fileno())


def _raw_bytes(proto: onnx.TensorProto) -> bytes:
    """Little-endian content, also of tensors that store their values in typed fields."""
    if proto.HasField("raw_data"):
        return proto.raw_data
    return onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(proto)).raw_data


def _external(proto: onnx.TensorProto, name: str, location: str, offset: int, length: int) -> onnx.TensorProto:
    made = onnx.TensorProto(name=name, data_type=proto.data_type, dims=proto.dims)
    made.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        made.external_data.add(key=key, value=str(value))
    return made


def _in_memory(tensor: gs.Constant) -> bool:
    values = tensor._values
    if isinstance(values, (FileValues, SparseValues)) or tensor.dtype == np.dtype(object):
        return False
    if isinstance(values, LazyValues) and values.tensor.data_type == onnx.TensorProto.STRING:
        return False
    return values.nbytes > INLINE_LIMIT


def constants_of(graph: gs.Graph) -> list[gs.Constant]:
    """Every constant once, in order of first use."""
    found: dict[int, gs.Constant] = {}
    for scope in scopes(graph):
        for tensor in (t for node in scope.nodes for t in node.inputs if isinstance(t, gs.Constant)):
            found.setdefault(id(tensor), tensor)
    return list(found.values())
