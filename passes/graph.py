"""ONNX files as onnx-graphsurgeon graphs and back, in one normal form, with weights left on disk.

The normal form that passes may rely on:

1. model-local functions are inlined;
2. tensor names are unique over the main graph and all subgraphs;
3. constants are `gs.Constant` tensors: a Constant node remains only where it is a graph's own output;
4. initialisers that are also graph inputs (IR version 3) are constants, no inputs;
5. the standard domain is "" and never "ai.onnx" or None.

Weights stay in their files until somebody asks for them (`passes.pattern.values_of`), and `spill` puts new ones into a
file as well, so a model larger than 2 GB is never in memory or in one protobuf message.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx_graphsurgeon as gs
from numpy.typing import NDArray
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter, dtype_to_onnx
from onnx_graphsurgeon.ir.tensor import LazyValues, SparseValues

from passes.onnx_model import external_files, load_structure
from plugins.errors import KilnError, first_line

INLINE_LIMIT = 1024
"""Bytes up to which a constant is kept in the graph itself: shape arithmetic needs those values at hand."""
_SUB_BYTE = {
    onnx.TensorProto.INT4,
    onnx.TensorProto.UINT4,
    onnx.TensorProto.FLOAT4E2M1,
    onnx.TensorProto.INT2,
    onnx.TensorProto.UINT2,
}
GENERATED = "inferred__"
"""How names of sizes begin that shape inference made up; each stands for one size in the whole graph."""
_ALIGNMENT = 4096
"""Offsets in a data file are multiples of a page, so that runtimes can map the weights."""


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


def graph_from_path(path: Path) -> gs.Graph:
    """Read an ONNX file in normal form. Raises KilnError for what is not readable."""
    proto = load_structure(path)
    external_files(path, proto)
    try:
        return graph_from_proto(proto, path.parent)
    except KilnError:
        raise
    except Exception as error:  # a graph that is damaged, but not so that protobuf notices
        raise KilnError(
            f"{path}: its graph cannot be read ({type(error).__name__}: {first_line(error)}); export it again"
        ) from error


def graph_from_proto(proto: onnx.ModelProto, folder: Path | None = None) -> gs.Graph:
    """A model in normal form; `folder` holds its external data. Raises KilnError for what graphs cannot carry."""
    _refuse_lossy(proto.graph)
    if proto.functions:
        proto = onnx.inliner.inline_local_functions(proto)
    elif any(opset.domain == "ai.onnx" for opset in proto.opset_import):
        copy = onnx.ModelProto()
        copy.CopyFrom(proto)
        proto = copy
    for opset in proto.opset_import:
        if opset.domain == "ai.onnx":
            opset.domain = ""
    graph = gs.import_onnx(proto)
    _make_names_unique(graph)
    for scope in scopes(graph):
        for node in scope.nodes:
            if node.domain in (None, "ai.onnx"):
                node.domain = ""
        constants_from_nodes(scope)
        if folder is not None:
            for tensor in _constants(scope):
                _place(tensor, folder)
    return graph


def proto_from_graph(graph: gs.Graph, metadata: dict[str, str] | None = None) -> onnx.ModelProto:
    """The model of a graph; constants of `FileValues` stay references to their files."""
    model = gs.export_onnx(graph, do_type_check=False)
    kept = {tensor.name for tensor in model.graph.initializer}
    for tensor in (*graph.outputs, *(t for scope in graph.subgraphs(recursive=True) for t in scope.outputs)):
        if isinstance(tensor, gs.Constant):
            raise ValueError(f"constant '{tensor.name}' is a graph's output; a node must produce it")
    for subgraph in subgraphs_of(model.graph):
        moved = [tensor for tensor in subgraph.initializer if tensor.name not in kept]
        model.graph.initializer.extend(moved)
        kept.update(tensor.name for tensor in moved)
        del subgraph.initializer[:]
        local = {name for node in subgraph.node for name in node.output} - {value.name for value in subgraph.output}
        known = [value for value in subgraph.value_info if value.name in local]
        del subgraph.value_info[:]
        subgraph.value_info.extend(known)
    used = {node.domain for scope in (model.graph, *subgraphs_of(model.graph)) for node in scope.node} | {""}
    domains = {opset.domain: opset.version for opset in model.opset_import if opset.domain in used}
    del model.opset_import[:]
    model.opset_import.extend(onnx.helper.make_opsetid(*item) for item in domains.items())
    if metadata:
        onnx.helper.set_model_props(model, metadata)
    return model


def scopes(graph: gs.Graph) -> Iterator[gs.Graph]:
    """The graph itself and every subgraph in it, outer before inner."""
    yield graph
    for node in graph.nodes:
        for subgraph in node.subgraphs():
            yield from scopes(subgraph)


def tidy(graph: gs.Graph) -> None:
    """Remove nodes that nothing uses and sort the rest topologically. Raises KilnError for a cycle."""
    graph.cleanup()
    for scope in scopes(graph):
        _sort(scope)


def infer_shapes(graph: gs.Graph) -> None:
    """Give tensors the dtypes and shapes that ONNX's inference finds; what is known already stays."""
    with _weights_apart(graph):
        proto = proto_from_graph(graph)
    small = {t.name: t for t in proto.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL}
    for subgraph in subgraphs_of(proto.graph):  # inference knows a constant's values only in the graph that holds it
        used = {name for node in subgraph.node for name in node.input}
        subgraph.initializer.extend(tensor for name, tensor in small.items() if name in used)
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except Exception:  # an operator of another domain may confuse it; passes then find fewer shapes
        return
    values = {
        value.name: value
        for scope in (inferred.graph, *subgraphs_of(inferred.graph))
        for value in (*scope.value_info, *scope.output)
        if value.type.HasField("tensor_type")
    }
    _rename_generated(graph, list(values.values()))
    for scope in scopes(graph):
        for node in scope.nodes:
            for tensor in node.outputs:
                if tensor.name in values and isinstance(tensor, gs.Variable):
                    _annotate(tensor, values[tensor.name])


def spill(graph: gs.Graph, file: Path) -> None:
    """Move constants above INLINE_LIMIT that are in memory into `file`, which is created if there are any."""
    _store([t for t in _all_constants(graph) if _in_memory(t)], file)


def consolidate(graph: gs.Graph, file: Path) -> None:
    """Put every constant above INLINE_LIMIT into one new `file`, each once; constants then refer to it."""
    _store([t for t in _all_constants(graph) if _in_memory(t) or isinstance(t._values, FileValues)], file)


def inline(graph: gs.Graph) -> None:
    """Read every constant into memory, for a model that is to be one file."""
    for tensor in _all_constants(graph):
        if isinstance(tensor._values, FileValues):
            tensor._values = tensor._values.load()


def data_files(graph: gs.Graph) -> dict[Path, int]:
    """The files that constants lie in, each with the bytes of it that are in use."""
    used: dict[Path, dict[int, int]] = {}
    for tensor in _all_constants(graph):
        if isinstance(tensor._values, FileValues):
            location, offset, length = tensor._values.place
            used.setdefault(tensor._values.folder / location, {})[offset] = length
    return {file: sum(places.values()) for file, places in used.items()}


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


@contextmanager
def _weights_apart(graph: gs.Graph) -> Iterator[None]:
    """Let large constants in memory look as if they were in a file, so that only the structure is copied."""
    kept = [(tensor, tensor._values) for tensor in _all_constants(graph) if _in_memory(tensor)]
    try:
        for tensor, values in kept:
            stub = onnx.TensorProto(data_type=dtype_to_onnx(tensor.export_dtype), dims=values.shape)
            tensor._values = LazyValues(_external(stub, tensor.name, "none", 0, values.nbytes))
        yield
    finally:
        for tensor, values in kept:
            tensor._values = values


def _place(tensor: gs.Constant, folder: Path) -> None:
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


def _all_constants(graph: gs.Graph) -> list[gs.Constant]:
    """Every constant once, in order of first use."""
    found: dict[int, gs.Constant] = {}
    for scope in scopes(graph):
        for tensor in _constants(scope):
            found.setdefault(id(tensor), tensor)
    return list(found.values())


def _constants(scope: gs.Graph) -> Iterator[gs.Constant]:
    for node in scope.nodes:
        for tensor in node.inputs:
            if isinstance(tensor, gs.Constant):
                yield tensor


def subgraphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Every graph inside a graph's nodes, at any depth."""
    for node in graph.node:
        for attribute in node.attribute:
            for subgraph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield subgraph
                yield from subgraphs_of(subgraph)


def _refuse_lossy(graph: onnx.GraphProto) -> None:
    """onnx-graphsurgeon drops some kinds of attribute; a model that has one must not lose it unseen."""
    kinds = onnx.AttributeProto
    lossy = {
        kinds.TYPE_PROTO,
        kinds.TYPE_PROTOS,
        kinds.SPARSE_TENSOR,
        kinds.SPARSE_TENSORS,
        kinds.TENSORS,
        kinds.GRAPHS,
    }
    for scope in (graph, *subgraphs_of(graph)):
        for node in scope.node:
            for attribute in node.attribute:
                if attribute.type in lossy:
                    raise KilnError(
                        f"node '{node.name or node.output[0]}' ({node.op_type}): attribute '{attribute.name}' is a "
                        f"{kinds.AttributeType.Name(attribute.type)}, which graph passes cannot carry; "
                        "export the model without it"
                    )


def _make_names_unique(graph: gs.Graph) -> None:
    """Two branches may use one name for different tensors; a later one gets a number."""
    owners: dict[str, gs.Tensor] = {}
    for scope in scopes(graph):
        for tensor in [
            *scope.inputs,
            *(t for node in scope.nodes for t in (*node.inputs, *node.outputs)),
            *scope.outputs,
        ]:
            if tensor.is_empty() or owners.setdefault(tensor.name, tensor) is tensor:
                continue
            number = 2
            while f"{tensor.name}__{number}" in owners:
                number += 1
            tensor.name = f"{tensor.name}__{number}"
            if isinstance(tensor, gs.Constant) and type(tensor._values) is LazyValues:
                own = onnx.TensorProto()  # exporting writes the name into the message, which is the caller's
                own.CopyFrom(tensor._values.tensor)
                tensor._values = LazyValues(own)
            owners[tensor.name] = tensor


def constants_from_nodes(scope: gs.Graph) -> None:
    """Make Constant nodes of one scope constant tensors, but for those that are its outputs."""
    outputs = {id(tensor) for tensor in scope.outputs}
    kept = []
    for node in scope.nodes:
        values = _constant_values(node) if node.op == "Constant" and id(node.outputs[0]) not in outputs else None
        if values is None:
            kept.append(node)
            continue
        output = node.outputs[0]
        node.outputs.clear()
        constant = gs.Constant(output.name, values)
        for consumer in list(output.outputs):
            for index, tensor in enumerate(consumer.inputs):
                if tensor is output:
                    consumer.inputs[index] = constant
    scope.nodes = kept


def _constant_values(node: gs.Node) -> "NDArray | LazyValues | None":
    """What a Constant node yields, in one of the spellings of opset 12; None for strings, sparse and references."""
    for name, value in node.attrs.items():
        if name == "value" and isinstance(value, gs.Constant):
            return value._values
        if name in ("value_float", "value_floats") and not isinstance(value, gs.Node.AttributeRef):
            return np.array(value, np.float32)
        if name in ("value_int", "value_ints") and not isinstance(value, gs.Node.AttributeRef):
            return np.array(value, np.int64)
    return None


def _rename_generated(graph: gs.Graph, values: list[onnx.ValueInfoProto]) -> None:
    """Give sizes that this inference named itself names of their own: it does not know those in subgraphs, say."""
    tensors = [tensor for scope in scopes(graph) for node in scope.nodes for tensor in node.outputs]
    taken = [size[len(GENERATED) :] for t in tensors for size in t.shape or () if str(size).startswith(GENERATED)]
    number = 1 + max((int(digits) for digits in taken if digits.isdigit()), default=-1)
    names: dict[str, str] = {}
    for value in values:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param.startswith("unk__"):
                names.setdefault(dim.dim_param, f"{GENERATED}{number + len(names)}")
                dim.dim_param = names[dim.dim_param]


def _annotate(tensor: gs.Variable, value: onnx.ValueInfoProto) -> None:
    kind = value.type.tensor_type
    if tensor.dtype is None and kind.elem_type:
        tensor.dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
    if not kind.HasField("shape"):
        return
    dims = [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in kind.shape.dim]
    if tensor.shape is None:
        tensor.shape = dims
    elif len(tensor.shape) == len(dims):
        tensor.shape = [
            new if isinstance(new, int) and not isinstance(old, int) else old
            for old, new in zip(tensor.shape, dims, strict=True)
        ]


def _sort(scope: gs.Graph) -> None:
    """Stable topological order: a node goes after what it, or a subgraph of it, reads in this scope."""
    position = {id(node): index for index, node in enumerate(scope.nodes)}
    done: set[int] = set()
    order: list[gs.Node] = []
    for root in scope.nodes:
        stack = [(root, iter(_feeders(root, position)))] if id(root) not in done else []
        path = {id(root)}
        while stack:
            node, feeders = stack[-1]
            for feeder in feeders:
                if id(feeder) in path:
                    raise KilnError(
                        f"node '{label(feeder)}' ({feeder.op}) depends on its own output: the graph has a cycle"
                    )
                if id(feeder) not in done:
                    path.add(id(feeder))
                    stack.append((feeder, iter(_feeders(feeder, position))))
                    break
            else:
                stack.pop()
                path.discard(id(node))
                done.add(id(node))
                order.append(node)
    scope.nodes = order


def _feeders(node: gs.Node, position: dict[int, int]) -> list[gs.Node]:
    tensors = [*node.inputs]
    for subgraph in node.subgraphs(recursive=True):
        tensors += [tensor for inner in subgraph.nodes for tensor in inner.inputs] + subgraph.outputs
    return [producer for tensor in tensors for producer in tensor.inputs if id(producer) in position]


def label(node: gs.Node) -> str:
    """How messages name a node: its name, else its first output."""
    return node.name or next((tensor.name for tensor in node.outputs if tensor.name), node.op)
