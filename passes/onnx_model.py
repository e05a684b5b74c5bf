"""`OnnxModel`: an ONNX file with what Kiln knows about it, the artefact that export and passes hand on.

A serving graph carries its decoder description in the model's metadata, so that the file alone is enough
to run, compare or rebuild it. Reads graph structure only, never weights.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from plugins.errors import KilnError, first_line
from plugins.paged_attention.schema import KvSpec

if TYPE_CHECKING:
    import onnx
    from google.protobuf.message import Message

DECODER_METADATA = "kiln.decoder"


@dataclass(frozen=True)
class DecoderSpec:
    """What the runtime must know of a model with a KV cache. `max_context` in tokens. All sizes are positive."""

    kv: KvSpec
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = [self.kv.block_size, self.vocab_size, self.max_context]
        sizes += [size for layer in self.kv.layers for size in (layer.kv_heads, layer.head_dim)]
        if not self.kv.layers or min(sizes) < 1:
            raise ValueError("a decoder has at least one layer, and all of its sizes are at least 1")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "DecoderSpec":
        """Raises ValueError for a text that is not exactly a decoder's."""
        return TypeAdapter(DecoderSpec).validate_json(text)


@dataclass(frozen=True)
class Tensor:
    """A graph input or output: numpy/ml_dtypes dtype name; a symbolic dimension is a string."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class OnnxModel:
    """An ONNX file on disk. `sha256` covers the graph and its external data; `decoder` is None without a KV cache."""

    path: Path
    sha256: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    decoder: DecoderSpec | None
    parameters: int


def onnx_model_from_path(path: Path) -> OnnxModel:
    """Read a file's structure. Raises KilnError for what is not a readable ONNX model."""
    proto = load_structure(path)
    digest = hashlib.sha256()
    for file in [path, *external_files(path, proto)]:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    initializers = {initializer.name for initializer in proto.graph.initializer}
    return OnnxModel(
        path=path,
        sha256=digest.hexdigest(),
        inputs=tuple(_tensor(value) for value in proto.graph.input if value.name not in initializers),
        outputs=tuple(_tensor(value) for value in proto.graph.output),
        decoder=decoder_from_structure(path, proto),
        parameters=sum(_elements(initializer.dims) for initializer in proto.graph.initializer),
    )


def decoder_from_structure(path: Path, proto: "onnx.ModelProto") -> DecoderSpec | None:
    """The decoder description in a model's metadata, None without. Raises KilnError for a damaged one."""
    for entry in proto.metadata_props:
        if entry.key == DECODER_METADATA:
            try:
                return DecoderSpec.from_json(entry.value)
            except ValueError as error:
                reason = "; ".join(str(error).splitlines()[1:3]) or error
                raise KilnError(
                    f"{path}: metadata '{DECODER_METADATA}' is damaged ({reason}); export it again"
                ) from error
    return None


def load_structure(path: Path) -> "onnx.ModelProto":
    """The graph without its external weights. Raises KilnError for what is not an ONNX model."""
    import onnx

    if not path.is_file():
        raise KilnError(f"{path} does not exist or is not a file; expected an .onnx model")
    try:
        proto = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise KilnError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # protobuf's errors, in any of its implementations
        raise KilnError(f"{path} is not an ONNX model or is truncated ({error}); export it again") from error
    if (damaged := _bytes_for_text(proto)) is not None:
        raise KilnError(f"{path} is damaged: {damaged!r} is no text; export it again")
    if not proto.graph.output:
        raise KilnError(f"{path} has no graph outputs; expected an ONNX model, found an empty or truncated file")
    return proto


def _bytes_for_text(message: "Message") -> bytes | None:
    """The first text field that is no UTF-8: protobuf hands such a one out as bytes."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            values = [value] if isinstance(value, (str, bytes)) else value
            wrong = next((text for text in values if isinstance(text, bytes)), None)
        elif field.type == field.TYPE_MESSAGE:
            parts = [value] if hasattr(value, "ListFields") else value
            wrong = next((found for part in parts if (found := _bytes_for_text(part)) is not None), None)
        else:
            continue
        if wrong is not None:
            return wrong
    return None


def external_files(path: Path, proto: "onnx.ModelProto") -> list[Path]:
    """The external data files of a model, sorted. Raises KilnError for one that is missing, or outside its folder."""
    names = {
        entry.value for tensor in _tensors(proto.graph) for entry in tensor.external_data if entry.key == "location"
    }
    files = []
    for name in sorted(names):
        file = path.parent / name
        if "\0" in name or not file.resolve().is_relative_to(path.parent.resolve()):
            raise KilnError(f"{path}: external data {name!r} lies outside the model's folder; refused")
        if not os.path.isfile(file):  # False also for a name that no file can have
            raise KilnError(f"{path}: external data file '{name}' is missing; copy it beside the model")
        files.append(file)
    return files


def check_tensors(path: Path, proto: "onnx.ModelProto") -> None:
    """Raise KilnError for a tensor inside the file whose values do not fit its type and shape."""
    import onnx

    for tensor in _tensors(proto.graph):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            try:
                onnx.checker.check_tensor(tensor)
            except onnx.checker.ValidationError as error:
                raise KilnError(
                    f"{path}: tensor '{tensor.name}' is damaged: {first_line(error)}; export it again"
                ) from error


def _tensors(graph: "onnx.GraphProto") -> "Iterator[onnx.TensorProto]":
    """Every stored tensor: initializers and attributes, subgraphs included."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            yield from (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors)
            for subgraph in (attribute.g, *attribute.graphs):
                yield from _tensors(subgraph)


def known_size(size: int | str | None) -> int | str | None:
    """A dimension as a file states it; None where exporters write -1 or "?", each time for another unknown size."""
    return None if size in (None, "", "?") or (isinstance(size, int) and size < 0) else size


def _tensor(value: "onnx.ValueInfoProto") -> Tensor:
    import onnx

    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        raise KilnError(f"input or output '{value.name}' is not a tensor; Kiln builds models of tensors only")
    stated = [known_size(dim.dim_value if dim.HasField("dim_value") else dim.dim_param) for dim in kind.shape.dim]
    dims = tuple(f"{value.name}_{axis}" if size is None else size for axis, size in enumerate(stated))
    try:
        dtype = str(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    except KeyError as error:
        raise KilnError(f"input or output '{value.name}' has the unknown element type {kind.elem_type}") from error
    return Tensor(value.name, dtype, dims)


def _elements(dims: "list[int]") -> int:
    product = 1
    for dim in dims:
        product *= dim
    return product
