"""FuseRope into paged attention, through the real kernel: layouts, shared tables, near misses, whole decoders."""

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from passes.bind_attention import BindAttention
from passes.fuse_rope import FuseRope
from passes.graph import graph_from_path, proto_from_graph
from passes.hoist_tables import HoistTables
from passes.shapes import infer_shapes
from passes.validate import check_graph
from passes.weights import consolidate
from plugins.build import cpu_library
from plugins.paged_attention.schema import DOMAIN, EXPORT_DOMAIN
from tests.passes.rope_models import CONSTANTS, SPELLINGS, tables

HEADS, KV_HEADS, SIZE, BLOCK_SIZE, BLOCKS = 4, 2, 8, 4, 6
TOLERANCE = 1e-5
FLAT = {"q": f"[-1, {HEADS * SIZE}]", "k": f"[-1, {KV_HEADS * SIZE}]"}
STEP = (
    "float[T,32] q_rows, float[T,16] k_rows, float[T,16] v, int32[T] position_ids, float[N,4,2,8] key_cache, "
    "float[N,4,2,8] value_cache, int32[C] cu, int32[Q] past, int32[Q,M] blocks, int32[T] slots"
)


def layout_before(name: str, layout: str, heads: int) -> str:
    """From rows [tokens, heads*size] to the tensor that is rotated, as exporters lay it out."""
    if layout == "flat":
        return f"{name} = Reshape({name}_rows, {name}_heads)\n{name}_heads = Constant<value_ints=[-1, {heads}, 8]>()"
    shape = (
        f"{name}_heads = Constant<value_ints=[1, -1, {heads}, 8]>()\n{name}_view = Reshape({name}_rows, {name}_heads)"
    )
    move = "Identity(" if layout == "tokens first" else "Transpose<perm=[0, 2, 1, 3]>("
    return f"{shape}\n{name} = {move}{name}_view)"


def layout_after(name: str, layout: str) -> str:
    move = "Transpose<perm=[0, 2, 1, 3]>(" if layout == "heads first" else "Identity("
    return (
        f"{name}_back = {move}{name}_done)\n{name}_flat = Constant<value_ints={FLAT[name]}>()\n"
        f"{name}_in = Reshape({name}_back, {name}_flat)"
    )


def rotation(name: str, body: str, prefix: str = "") -> str:
    """A spelling's nodes for x := name, all names made unique."""
    made = {part.strip() for line in body.splitlines() if "=" in line for part in line.split("=")[0].split(",")}
    for old in sorted(made, key=len, reverse=True):
        new = f"{name}_done" if old == "y" else f"{name}_{old}"
        body = rename(body, old, new)
    return rename(body, "x", name)


def rename(text: str, old: str, new: str) -> str:
    return re.sub(rf"(?<![\w<]){old}(?![\w=])", new, text)


def paged(
    spelling: str = "halves by Slice",
    layout: str = "heads first",
    domain: str = DOMAIN,
    rotate: tuple[str, ...] = ("q", "k"),
    extra: str = "",
    outputs: str = "",
    ids: str = "position_ids",
) -> onnx.ModelProto:
    """Attention over query and key rotated in a spelling, in a layout."""
    found = SPELLINGS[spelling]
    axis = {"heads first": "c0", "tokens first": "c1", "flat": "c1"}[layout]
    look_up = found.look_up.replace(", ids)", f", {ids})").replace("_rows, c1)", f"_rows, {axis})")
    if layout == "tokens first":
        look_up = look_up.replace("cos = Unsqueeze(cos_rows, c1)", "cos = Unsqueeze(cos_rows, c01)")
        look_up = look_up.replace("sin = Unsqueeze(sin_rows, c1)", "sin = Unsqueeze(sin_rows, c01)")
        look_up = "c01 = Constant<value_ints=[0, 2]>()\n" + look_up
    elif layout == "heads first":
        look_up = "c01 = Constant<value_ints=[0, 1]>()\n" + look_up.replace("_rows, c0)", "_rows, c01)")
    parts = [CONSTANTS, extra, look_up]
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        parts.append(sorted_constants(layout_before(name, layout, heads)))
        turned = rotation(name, found.body) if name in rotate else f"{name}_done = Relu({name})"
        parts += [turned, layout_after(name, layout)]
    parts.append(
        f"out, key_out, value_out = {domain}.PagedAttention<num_heads: int = 4, kv_num_heads: int = 2>"
        "(q_in, k_in, v, key_cache, value_cache, cu, past, blocks, , , slots)"
    )
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21, "{EXPORT_DOMAIN}" : 1, "{DOMAIN}" : 1]> '
        f"m ({STEP}) => (float[T,32] out, float[N,4,2,8] key_out, float[N,4,2,8] value_out{outputs}) "
        f"{{ {chr(10).join(parts)} }}"
    )
    for tensor_name, value in tables(found).items():
        model.graph.initializer.append(numpy_helper.from_array(value, tensor_name))
    return model


def sorted_constants(text: str) -> str:
    return "\n".join(sorted(text.splitlines(), key=lambda line: "Constant" not in line))


def step(counts: list[int], past: list[int]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng()
    tokens = sum(counts)
    positions = np.concatenate([start + np.arange(count) for start, count in zip(past, counts, strict=True)])
    blocks = generator.permutation(BLOCKS).reshape(2, 3).astype(np.int32)
    rows = np.repeat([0, 1], counts)
    return {
        "q_rows": generator.standard_normal((tokens, 32), np.float32),
        "k_rows": generator.standard_normal((tokens, 16), np.float32),
        "v": generator.standard_normal((tokens, 16), np.float32),
        "position_ids": positions.astype(np.int32),
        "key_cache": generator.standard_normal((BLOCKS, BLOCK_SIZE, KV_HEADS, SIZE), np.float32),
        "value_cache": generator.standard_normal((BLOCKS, BLOCK_SIZE, KV_HEADS, SIZE), np.float32),
        "cu": np.cumsum([0, *counts]).astype(np.int32),
        "past": np.array(past, np.int32),
        "blocks": blocks,
        "slots": (blocks[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE).astype(np.int32),
    }


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(cpu_library()))
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {name: value.copy() for name, value in feeds.items()})


def assert_same(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    for counts, past in (([7, 3], [0, 0]), ([1, 1], [5, 9]), ([2, 5], [8, 0])):
        feeds = step(counts, past)
        for expected, found in zip(run(before, feeds), run(after, feeds), strict=True):
            assert np.abs(expected - found).max() <= TOLERANCE * np.abs(expected).max()


def attention(model: onnx.ModelProto) -> onnx.NodeProto:
    (node,) = (node for node in model.graph.node if node.op_type == "PagedAttention")
    return node


FLEXIBLE = [name for name in SPELLINGS if "Reshape(" not in SPELLINGS[name].body + SPELLINGS[name].look_up]


@pytest.mark.parametrize(("layout", "spelling"), [
    *(("heads first", name) for name in SPELLINGS if name not in ("pairs, sines and cosines in one table",)),
    *(("tokens first", name) for name in FLEXIBLE),
    *(("flat", name) for name in FLEXIBLE if "c3" not in SPELLINGS[name].body and "axis=3" not in SPELLINGS[name].body),
])  # fmt: skip
def test_rotation_moves_into_the_operator(tools, layout, spelling):
    model = paged(spelling, layout)
    applied = tools.apply(model, FuseRope())
    assert applied.ops == ["Reshape", "Reshape", f"{DOMAIN}::PagedAttention"]
    node = attention(applied.model)
    found = {attribute.name: attribute.i for attribute in node.attribute}
    assert found["do_rotary"] == 1
    assert found["rotary_interleaved"] == SPELLINGS[spelling].interleaved
    caches = {tensor.name: list(tensor.dims) for tensor in applied.model.graph.initializer}
    assert [caches[name] for name in node.input[8:10]] == [[32, SPELLINGS[spelling].rotary // 2]] * 2
    assert [value.name for value in applied.model.graph.input] == [value.name for value in model.graph.input]
    assert_same(model, applied.model)


def test_both_domains(tools):
    applied = tools.apply(paged(domain=EXPORT_DOMAIN), FuseRope())
    assert applied.ops == ["Reshape", "Reshape", f"{EXPORT_DOMAIN}::PagedAttention"]


NEAR_MISSES = {
    "only the query": ({"rotate": ("q",)}, "only one of query and key is rotated"),
    "only the key": ({"rotate": ("k",)}, "only one of query and key is rotated"),
    "read elsewhere": ({"outputs": ", float[1,2,T,8] k_done"}, "the rotated key 'k_done' is read elsewhere too"),
    "other positions": (
        {"extra": "later = Add(position_ids, one)\none = Constant<value = int32 {1}>()", "ids": "later"},
        "rotated by 'later'; expected the graph's input 'position_ids'",
    ),
    "slots as positions": ({"ids": "slots"}, "rotated by 'slots'"),
    "no rotation": ({"rotate": ()}, None),
}


@pytest.mark.parametrize("what", NEAR_MISSES)
def test_near_misses_stay(tools, what):
    options, note = NEAR_MISSES[what]
    if "extra" in options:
        options = options | {"extra": sorted_constants(options["extra"])}
    applied = tools.apply(paged(**options), FuseRope())
    assert not applied.outcome.changed
    assert "Relu" in applied.ops or "Neg" in applied.ops
    assert [note in text for text in applied.outcome.notes] == ([True] if note else [])


def test_different_tables_for_query_and_key_are_refused(tools):
    model = paged()
    (product,) = (node for node in model.graph.node if node.output[0] == "k_cos_part")
    product.input[1] = "sin"
    applied = tools.apply(model, FuseRope())
    assert not applied.outcome.changed
    assert "query and key are rotated by different tables" in applied.outcome.notes[0]


def test_a_head_order_that_attention_would_not_undo_is_refused(tools):
    model = paged()
    (back,) = (n for n in model.graph.node if n.output[0] == "q_back")
    back.op_type, back.attribute[0].ints[:] = "Transpose", [0, 1, 2, 3]
    applied = tools.apply(model, FuseRope())
    assert not applied.outcome.changed
    assert "the query's layout between rotation and attention" in applied.outcome.notes[0]


def test_normalised_query_and_key(tools):
    """Qwen3 normalises each head between the projection and the rotation."""
    model = paged()
    for name in ("q", "k"):
        place = next(i for i, n in enumerate(model.graph.node) if n.output[0] == name)
        norm = helper.make_node("LpNormalization", [f"{name}_view"], [f"{name}_norm"], axis=-1, p=2)
        model.graph.node[place].input[0] = f"{name}_norm"
        model.graph.node.insert(place, norm)
    applied = tools.apply(model, FuseRope())
    assert [op for op in applied.ops if op != "Reshape"] == ["LpNormalization"] * 2 + [f"{DOMAIN}::PagedAttention"]
    assert_same(model, applied.model)


def test_subgraphs(tools):
    model = paged()
    for value in (*model.graph.input, *model.graph.output):
        for dim, size in zip(value.type.tensor_type.shape.dim, (6,), strict=False):
            if dim.dim_param == "N":
                dim.dim_value = size
    branched = tools.in_branch(model)
    applied = tools.apply(branched, FuseRope())
    assert applied.ops == ["If", *["Reshape", "Reshape", f"{DOMAIN}::PagedAttention"] * 2]
    feeds = step([3, 2], [4, 0])
    for flag in (True, False):
        for expected, found in zip(
            *(run(m, feeds | {"flag": np.array(flag)}) for m in (branched, applied.model)), strict=True
        ):
            assert np.abs(expected - found).max() <= TOLERANCE * np.abs(expected).max()


def decoder(kind: str, folder: Path) -> Path:
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config, model = {
        "phi": (transformers.PhiConfig(**sizes, partial_rotary_factor=0.5), transformers.PhiForCausalLM),
    }[kind]
    model(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["llama", "phi"])
def test_whole_decoders_in_chunks(kind, tiny_llama_folder, tmp_path):
    """Two sequences, prompts in chunks, then single tokens: logits and caches as without the pass."""
    from pipeline.config import BuildConfig
    from pipeline.export import export_model
    from pipeline.load import describe, load
    from pipeline.packed import packed_logits
    from pipeline.source import resolve_source

    folder = tiny_llama_folder if kind == "llama" else decoder(kind, tmp_path / kind)
    source = resolve_source(str(folder))
    exported = export_model(load(source, describe(source)), tmp_path / "model.onnx", BuildConfig())
    paths = []
    for name, passes in (
        ("plain", [BindAttention()]),
        ("fused", [HoistTables(max_positions=256), FuseRope(), BindAttention()]),
    ):
        graph = graph_from_path(exported.path)
        for graph_pass in passes:
            infer_shapes(graph)
            graph_pass.call(graph)
            check_graph(graph)
        consolidate(graph, tmp_path / f"{name}.onnx.data")
        paths.append(tmp_path / f"{name}.onnx")
        paths[-1].write_bytes(proto_from_graph(graph).SerializeToString())
    ops = [node.op for node in graph.nodes]
    assert ops.count("PagedAttention") == 2
    assert {"Neg", "Cos", "Sin", "Concat", "Slice"}.isdisjoint(ops)
    caches = {id(tensor) for node in graph.nodes if node.op == "PagedAttention" for tensor in node.inputs[8:10]}
    assert len(caches) == 2
    texts = [np.random.default_rng(seed).integers(0, exported.decoder.vocab_size, 24) for seed in (1, 2)]
    steps = [[9, 4], [1, 18], [12, 1], [1, 1], [1, 0]]
    plain, fused = (packed_logits(path, exported.decoder, [cpu_library()], texts, steps) for path in paths)
    for expected, found in zip(plain, fused, strict=True):
        assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
