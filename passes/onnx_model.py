"""`OnnxModel`: an ONNX file with what Kiln knows about it, the artefact that export and passes hand on.

A serving graph carries its decoder description in the model's metadata, so that the file alone is enough
to run, compare or rebuild it. Reads graph structure only, never weights.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plugins.errors import KilnError
from plugins.paged_attention.schema import KvLayer, KvSpec

if TYPE_CHECKING:
    import onnx

DECODER_METADATA = "kiln.decoder"


@dataclass(frozen=True)
class DecoderSpec:
    """What the runtime must know of a model with a KV cache. `max_context` in tokens."""

    kv: KvSpec
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "DecoderSpec":
        fields = json.loads(text)
        kv = fields.pop("kv")
        layers = tuple(KvLayer(**layer) for layer in kv.pop("layers"))
        return DecoderSpec(kv=KvSpec(layers=layers, **kv), eos_token_ids=tuple(fields.pop("eos_token_ids")), **fields)


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
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise KilnError(
                    f"{path}: metadata '{DECODER_METADATA}' is damaged ({error}); export it again"
                ) from error
    return None


def load_structure(path: Path) -> "onnx.ModelProto":
    """The graph without its external weights. Raises KilnError for what is not an ONNX model."""
    import onnx
    from google.protobuf.message import DecodeError

    if not path.is_file():
        raise KilnError(f"{path} does not exist or is not a file; expected an .onnx model")
    try:
        proto = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise KilnError(f"{path} is not an ONNX model or is truncated ({error}); export it again") from error
    if not proto.graph.output:
        raise KilnError(f"{path} has no graph outputs; expected an ONNX model, found an empty or truncated file")
    return proto


def external_files(path: Path, proto: "onnx.ModelProto") -> list[Path]:
    """The external data files of a model, sorted. Raises KilnError for one that is missing, or outside its folder."""
    names = {
        entry.value
        for initializer in proto.graph.initializer
        for entry in initializer.external_data
        if entry.key == "location"
    }
    files = []
    for name in sorted(names):
        file = path.parent / name
        if not file.resolve().is_relative_to(path.parent.resolve()):
            raise KilnError(f"{path}: external data '{name}' lies outside the model's folder; refused")
        if not file.is_file():
            raise KilnError(f"{path}: external data file '{name}' is missing; copy it beside the model")
        files.append(file)
    return files


def _tensor(value: "onnx.ValueInfoProto") -> Tensor:
    import onnx

    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        raise KilnError(f"input or output '{value.name}' is not a tensor; Kiln builds models of tensors only")
    dims = tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or f"{value.name}_{axis}"
        for axis, dim in enumerate(kind.shape.dim)
    )
    return Tensor(value.name, str(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)), dims)


def _elements(dims: "list[int]") -> int:
    product = 1
    for dim in dims:
        product *= dim
    return product
