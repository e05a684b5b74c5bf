"""A bundle made from another one: other serving settings or block size, everything else linked, not copied.

The block size is no part of the weights and of the arithmetic: it is a dimension of the cache inputs, which only the
paged-attention operator reads, and takes from their shape. So it can be changed in the graph's description alone. The
new graph is run beside the parent's before anything is published.
"""

import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from engines.backends.onnxruntime import CPU
from engines.bundle import BundleError, EngineBundle, file_records, open_bundle, write_bundle
from engines.manifest import DISTRIBUTION, CheckRecord, FileRecord, Manifest, ServingRecord, TensorRecord
from passes.manager import link_or_copy
from passes.onnx_model import DECODER_METADATA, DecoderSpec, load_structure
from pipeline.check import check_against_parent
from pipeline.compare.onnx_subject import bound_graph
from plugins.build import cpu_library
from plugins.dense import schema as dense
from plugins.dense.cuda_search import Product
from plugins.dense.schema import LINEAR, LINEAR_SWIGLU
from plugins.errors import KilnError
from plugins.paged_attention.schema import OP_TYPE
from plugins.quant_matmul import cuda_schema as low_bit
from plugins.quant_matmul.cuda_schema import QUANT_LINEAR, QUANT_LINEAR_SWIGLU

if TYPE_CHECKING:
    import onnx

_BLOCK_AXIS = 1  # of [blocks, block_size, kv_heads, head_dim]
LOW_BIT = frozenset({QUANT_LINEAR.op_type, QUANT_LINEAR_SWIGLU.op_type})
_MOST_ROWS = {
    **dict.fromkeys((LINEAR.op_type, LINEAR_SWIGLU.op_type), dense.KERNEL_ROWS),
    **dict.fromkeys(LOW_BIT, low_bit.KERNEL_ROWS),
}
"""Kinds of products with `kernel_rows`, and the most of each."""


def derive_bundle(
    parent: EngineBundle,
    path: Path,
    *,
    block_size: int | None = None,
    kernel_rows: int | None = None,
    algorithms: Mapping[Product, str] | None = None,
    serving: ServingRecord | None = None,
    verified: CheckRecord | None = None,
) -> EngineBundle:
    """Write `parent` to `path` with other settings; the new manifest names the parent's identity.

    `block_size` None, or the parent's own, and `kernel_rows` None keep the graph as it is; `algorithms` are the
    attributes of that name by product, of those that get another one. `verified` is a check on the device, after which
    nothing is unverified. Files are hard links where the file system has them, so that they cost nothing and outlive
    the parent.

    Raises BundleError when the parent is not, or no longer, what it was when it was opened, or `path` is the parent;
    KilnError when the block size cannot be changed, or the changed graph gives other logits.
    """
    if path.resolve() == parent.path.resolve():
        raise BundleError(f"{path} is the bundle itself; choose another --out, so that the parent remains")
    decoder = parent.manifest.decoder
    changes_blocks = block_size is not None and (decoder is None or decoder.kv.block_size != block_size)

    def fill(folder: Path) -> Manifest:
        manifest = parent.manifest
        changes_products = kernel_rows is not None or bool(algorithms)
        own = {manifest.engine} if changes_blocks or changes_products else set()
        _link(parent, folder, (name for name in manifest.files if name not in own))
        _refuse_changes(parent, file_records(folder))
        if changes_blocks:
            assert block_size is not None
            manifest = _with_block_size(parent, folder, block_size)
        if changes_products:
            engine = folder / manifest.engine
            engine.parent.mkdir(parents=True, exist_ok=True)
            source = engine if changes_blocks else parent.engine_path
            write_graph_with_products(source, engine, kernel_rows, algorithms or {})
        if open_bundle(parent.path).sha256 != parent.sha256:
            raise _changed(parent, "its identity")
        return manifest.model_copy(
            update={
                "kiln_version": version(DISTRIBUTION),
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "parent": parent.sha256,
                "serving": serving,
                "checks": manifest.checks if verified is None else (*manifest.checks, verified),
                "unverified": manifest.unverified if verified is None else (),
                "files": file_records(folder),
            }
        )

    return write_bundle(path, fill)


def _link(parent: EngineBundle, folder: Path, names: Iterable[str]) -> None:
    for name in names:
        try:
            link_or_copy(parent.path / name, folder / name)
        except FileNotFoundError as error:
            raise _changed(parent, name) from error


def _refuse_changes(parent: EngineBundle, found: dict[str, FileRecord]) -> None:
    for name, record in found.items():
        if parent.manifest.files[name] != record:
            raise _changed(parent, name)


def _changed(parent: EngineBundle, what: str) -> BundleError:
    return BundleError(
        f"{parent.path} was changed after it was opened ({what}); expected the bundle {parent.sha256[:12]}: "
        "nothing was written, start again"
    )


def _with_block_size(parent: EngineBundle, folder: Path, block_size: int) -> Manifest:
    """Write the graph for another block size, check it, and return the manifest that describes it."""
    manifest = parent.manifest
    decoder = manifest.decoder
    if decoder is None:
        raise KilnError(f"{manifest.name} has no KV cache, so it has no block size to change")
    changed = replace(decoder, kv=replace(decoder.kv, block_size=block_size))
    engine = folder / manifest.engine
    engine.parent.mkdir(parents=True, exist_ok=True)
    write_graph_with_block_size(parent.engine_path, engine, changed)
    on_cpu = manifest.backend.provider == CPU
    libraries = [folder / plugin.file for plugin in manifest.plugins] if on_cpu else [cpu_library()]
    with tempfile.TemporaryDirectory(prefix="kiln-derive-") as work:
        folders = [Path(work) / name for name in ("before", "after")]
        for one in folders:
            one.mkdir()
        before, after = map(bound_graph, (parent.engine_path, engine), folders)
        check = check_against_parent(before, decoder, after, changed, libraries)
    caches = _cache_tensors(changed)
    return manifest.model_copy(
        update={
            "decoder": changed,
            "inputs": tuple(_resized(record, caches, block_size) for record in manifest.inputs),
            "outputs": tuple(_resized(record, caches, block_size) for record in manifest.outputs),
            "checks": (*manifest.checks, check),
        }
    )


def products_in(engine: Path) -> dict[str, int]:
    """Kinds of a graph's products whose kernel can be chosen, with the most `kernel_rows` that each takes."""
    nodes = load_structure(engine).graph.node
    return {node.op_type: _MOST_ROWS[node.op_type] for node in nodes if _is_product(node)}


def dense_products(engine: Path) -> dict[Product, int]:
    """The products with 16-bit weights of a graph, and how often each stands in it."""
    return dict(Counter(_dense_products(load_structure(engine)).values()))


def write_graph_with_products(source: Path, target: Path, rows: int | None, algorithms: Mapping[Product, str]) -> None:
    """Copy a serving graph, without its external weights, with other `kernel_rows` and `algorithms` for its products.

    `rows`: those that take fewer get their most; None leaves them as they are. Products that `algorithms` does not name
    keep their own.
    """
    proto = load_structure(source)
    dense_of = _dense_products(proto)
    for index, node in enumerate(proto.graph.node):
        if rows is not None and _is_product(node):
            _set(node, "kernel_rows", min(rows, _MOST_ROWS[node.op_type]))
        product = dense_of.get(index)
        if product is not None and product in algorithms:
            _set(node, "algorithms", algorithms[product])
    target.write_bytes(proto.SerializeToString(deterministic=True))


def _set(node: "onnx.NodeProto", name: str, value: int | str) -> None:
    import onnx

    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])


def _dense_products(proto: "onnx.ModelProto") -> dict[int, Product]:
    """By the node's place among the graph's. Products whose weight is no initializer are left out."""
    import onnx

    weights = {weight.name: weight for weight in proto.graph.initializer}
    found = {}
    for index, node in enumerate(proto.graph.node):
        if node.domain != LINEAR.domain or node.op_type not in (LINEAR.op_type, LINEAR_SWIGLU.op_type):
            continue
        weight = weights.get(node.input[1])
        if weight is None:
            continue
        swiglu = node.op_type == LINEAR_SWIGLU.op_type
        width, depth = weight.dims
        half = weight.data_type == onnx.TensorProto.FLOAT16
        found[index] = Product(
            width=width // 2 if swiglu else width,
            depth=depth,
            swiglu=swiglu,
            bias=len(node.input) > 2 and bool(node.input[2]),
            dtype="float16" if half else "bfloat16",
        )
    return found


def _is_product(node: "onnx.NodeProto") -> bool:
    return node.domain == LINEAR.domain and node.op_type in _MOST_ROWS


def write_graph_with_block_size(source: Path, target: Path, decoder: DecoderSpec) -> None:
    """Copy a serving graph, without its external weights, with the block size of `decoder` in its description.

    Raises KilnError where anything but paged attention reads a cache, and so may depend on the block size.
    """
    proto = load_structure(source)
    caches = _cache_tensors(decoder)
    for node in proto.graph.node:
        if node.op_type != OP_TYPE and caches & {*node.input, *node.output}:
            raise KilnError(
                f"{source}: {node.op_type} {node.name} uses a cache; the block size can be changed only where "
                f"{OP_TYPE} alone does: build the model again with --block-size {decoder.kv.block_size}"
            )
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        if value.name in caches:
            _resize(value, decoder.kv.block_size)
    for entry in proto.metadata_props:
        if entry.key == DECODER_METADATA:
            entry.value = decoder.to_json()
    target.write_bytes(proto.SerializeToString(deterministic=True))


def _cache_tensors(decoder: DecoderSpec) -> set[str]:
    tensors = [tensor for layer in range(len(decoder.kv.layers)) for tensor in decoder.kv.tensors(layer)]
    return {name for tensor in tensors for name in (tensor.name, tensor.output_name)}


def _resize(value: "onnx.ValueInfoProto", block_size: int) -> None:
    """A symbolic dimension stays: it takes any block size."""
    dimension = value.type.tensor_type.shape.dim[_BLOCK_AXIS]
    if dimension.HasField("dim_value"):
        dimension.dim_value = block_size


def _resized(record: TensorRecord, caches: set[str], block_size: int) -> TensorRecord:
    if record.name not in caches or not isinstance(record.shape[_BLOCK_AXIS], int):
        return record
    blocks, _, *rest = record.shape
    return record.model_copy(update={"shape": (blocks, block_size, *rest)})
