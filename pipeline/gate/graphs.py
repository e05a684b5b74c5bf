"""The graph files behind a gate's two sides, and copies of the reference with a change that everybody accepts."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from engines.backends.onnxruntime import OnnxRuntimeDecoder, OnnxRuntimeModel
from engines.bundle import open_bundle
from engines.runtime.engine import Engine
from engines.runtime.info import EngineInfo
from engines.runtime.opening import check_plugins, default_kv_blocks
from passes.manager import link_weights
from passes.onnx_model import DECODER_METADATA, DecoderSpec, load_structure, onnx_model_from_path
from pipeline.compare.engine_subject import EngineDecoder, EnginePlain, scheduling
from pipeline.compare.onnx_subject import bound_graph
from pipeline.compare.report import Side
from pipeline.compare.subjects import Subject
from pipeline.io_layout import permutations_from_path
from plugins.paged_attention.schema import CacheDtype, cache_names, cache_output_names


@dataclass(frozen=True)
class GraphFile:
    """A graph that runs here: its operators' libraries, and its decoder description where it has a KV cache."""

    path: Path
    decoder: DecoderSpec | None
    plugins: tuple[Path, ...]


def graph_file_of(subject: Subject) -> GraphFile | None:
    """The graph that a subject runs; None for a torch model. Raises KilnError as opening it does."""
    side = subject.side
    if side.kind == "bundle":
        bundle = open_bundle(Path(side.path))
        check_plugins(bundle)
        return GraphFile(bundle.engine_path, bundle.manifest.decoder, tuple(bundle.plugin_paths))
    return graph_file_from_path(Path(side.path)) if side.kind == "onnx" else None


def graph_file_from_path(path: Path) -> GraphFile:
    """An .onnx file. Raises KilnError for what is none."""
    model = onnx_model_from_path(path)
    if model.decoder is None:
        return GraphFile(path, None, ())
    from plugins.build import cpu_library

    return GraphFile(path, model.decoder, (cpu_library(),))


@contextmanager
def bound(graph: GraphFile) -> Iterator[GraphFile]:
    """The same with its attention bound to this machine's operator, in a temporary copy where need be."""
    if graph.decoder is None:
        yield graph
        return
    with tempfile.TemporaryDirectory(prefix="kiln-gate-") as folder:
        yield replace(graph, path=bound_graph(graph.path, Path(folder)))


@contextmanager
def with_rounded_cache(graph: GraphFile, dtype: CacheDtype = "bfloat16") -> Iterator[GraphFile]:
    """A decoder whose KV cache holds a shorter type, in a temporary copy."""
    import onnx

    assert graph.decoder is not None
    with bound(graph) as source, tempfile.TemporaryDirectory(prefix="kiln-gate-") as folder:
        proto = load_structure(source.path)
        caches = {
            name
            for layer in range(len(graph.decoder.kv.layers))
            for name in (*cache_names(layer), *cache_output_names(layer))
        }
        kind = {"bfloat16": onnx.TensorProto.BFLOAT16, "float16": onnx.TensorProto.FLOAT16}[dtype]
        for value in (*proto.graph.input, *proto.graph.output):
            if value.name in caches:
                value.type.tensor_type.elem_type = kind
        stale = [value for value in proto.graph.value_info if value.name in caches]
        for value in stale:
            proto.graph.value_info.remove(value)
        decoder = replace(graph.decoder, kv=replace(graph.decoder.kv, dtype=dtype))
        kept = {entry.key: entry.value for entry in proto.metadata_props}
        onnx.helper.set_model_props(proto, {**kept, DECODER_METADATA: decoder.to_json()})
        link_weights(source.path, Path(folder))
        path = Path(folder) / source.path.name
        path.write_bytes(proto.SerializeToString())
        yield GraphFile(path, decoder, graph.plugins)


@contextmanager
def variant(
    graph: GraphFile, like: Subject, name: str, *, optimized: bool, threads: int | None, max_running: int = 1
) -> Iterator[Subject]:
    """A changed copy of the subject `like` as a subject of its own, called `name`."""
    side = replace(like.side, kind="onnx", name=name, path=str(graph.path))
    subject = _opened(graph, like, side, optimized, threads, max_running)
    try:
        yield subject
    finally:
        subject.close()


def _opened(
    graph: GraphFile, like: Subject, side: Side, optimized: bool, threads: int | None, max_running: int
) -> Subject:
    if graph.decoder is None:
        assert isinstance(like, EnginePlain)
        model = OnnxRuntimeModel(graph.path, plugins=graph.plugins, optimized=optimized, threads=threads)
        engine = Engine.from_model(model, EngineInfo(side.name, "model"))
        return EnginePlain(side, engine, like.inputs, permutations_from_path(graph.path))
    with bound(graph) as runnable:
        backend = OnnxRuntimeDecoder(
            runnable.path,
            graph.decoder.kv,
            default_kv_blocks(graph.decoder, max_running),
            plugins=graph.plugins,
            optimized=optimized,
            threads=threads,
        )
    engine = Engine.from_decoder(
        backend, graph.decoder, config=scheduling(max_running), info=EngineInfo(side.name, "decoder")
    )
    return EngineDecoder(side, engine, graph.decoder, encode=None)
