"""Attention in bfloat16: what changes, what stays, subgraphs, and equality through the real kernel."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from passes.attention_precision import AttentionPrecision
from passes.standard import PassSwitches, PassTarget, standard_passes
from plugins.errors import KilnError
from plugins.paged_attention.reference import Attributes, Inputs, paged_attention
from plugins.paged_attention.schema import DOMAIN, EXPORT_DOMAIN, INPUTS, OP_TYPE

from .conftest import apply_pass, run_model

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TOKENS = 6, 2, 32, 4, 20
ATTRIBUTES = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "scale": 0.25}
GIVEN = [spec for spec in INPUTS if not spec.optional or spec.name in ("key", "value")]
KINDS = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32}
FLAG = helper.make_tensor_value_info("flag", TensorProto.BOOL, [])


def attention(suffix: str = "", domain: str = DOMAIN, op: str = OP_TYPE, **attributes: int) -> onnx.NodeProto:
    names = [spec.name if spec in GIVEN else "" for spec in INPUTS]
    outputs = [f"output{suffix}", f"keys{suffix}", f"values{suffix}"]
    return helper.make_node(op, names, outputs, domain=domain, **ATTRIBUTES, **attributes)


def output(name: str = "output") -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, HEADS * HEAD_DIM])


def model_of(node: onnx.NodeProto, *more: onnx.ValueInfoProto) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info(s.name, KINDS[s.dtypes[0]], [None] * len(s.shape)) for s in GIVEN]
    graph = helper.make_graph([node], "g", [*more, *inputs], [output()])
    opsets = [helper.make_opsetid(domain, version) for domain, version in (("", 21), (EXPORT_DOMAIN, 1), (DOMAIN, 1))]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def feeds() -> dict[str, np.ndarray]:
    """One prompt, long enough that the kernel rounds its operands."""
    rng = np.random.default_rng(0)
    width = -(-TOKENS // BLOCK_SIZE)
    arrays = {
        "query": rng.normal(size=(TOKENS, HEADS * HEAD_DIM)),
        "key": rng.normal(size=(TOKENS, KV_HEADS * HEAD_DIM)),
        "value": rng.normal(size=(TOKENS, KV_HEADS * HEAD_DIM)),
        "key_cache": np.zeros((width, BLOCK_SIZE, KV_HEADS, HEAD_DIM)),
        "value_cache": np.zeros((width, BLOCK_SIZE, KV_HEADS, HEAD_DIM)),
    }
    return {
        **{name: array.astype(np.float32) for name, array in arrays.items()},
        "cumulative_sequence_length": np.array([0, TOKENS], np.int32),
        "past_seqlens": np.array([0], np.int32),
        "block_table": np.arange(width, dtype=np.int32)[None],
        "slot_mapping": np.arange(TOKENS, dtype=np.int32),
    }


def distance(found: np.ndarray, compute_dtype: int) -> float:
    expected = paged_attention(Inputs(**feeds()), Attributes(**ATTRIBUTES, compute_dtype=compute_dtype))[0]
    return float(np.median(np.abs(found - expected)) / np.abs(expected).max())


def test_sets_the_attribute_and_nothing_else_and_the_kernel_follows():
    before = model_of(attention())
    applied = apply_pass(before, AttentionPrecision())
    node = applied.model.graph.node[0]
    assert applied.outcome.rewrites == 1
    assert {a.name: helper.get_attribute_value(a) for a in node.attribute} == {**ATTRIBUTES, "compute_dtype": 1}
    assert list(node.input) == list(before.graph.node[0].input)
    found = run_model(applied.model, feeds())[0]
    assert distance(found, 1) < 1e-5 < 1e-4 < distance(found, 0)


def test_takes_the_attribute_back():
    applied = apply_pass(model_of(attention(compute_dtype=1)), AttentionPrecision("float32"))
    assert applied.outcome.rewrites == 1
    assert distance(run_model(applied.model, feeds())[0], 0) < 1e-6


def test_works_inside_subgraphs():
    branches = {
        f"{name}_branch": helper.make_graph([attention(f"_{name}")], name, [], [output(f"output_{name}")])
        for name in ("then", "else")
    }
    model = model_of(helper.make_node("If", ["flag"], ["output"], **branches), FLAG)
    applied = apply_pass(model, AttentionPrecision())
    assert applied.outcome.rewrites == 2
    assert distance(run_model(applied.model, {"flag": np.array(True), **feeds()})[0], 1) < 1e-5


@pytest.mark.parametrize(
    "node", [attention(domain=EXPORT_DOMAIN), attention(op="Attention"), attention(compute_dtype=1)]
)
def test_leaves_alone_what_is_not_ours_or_done(node: onnx.NodeProto):
    applied = apply_pass(model_of(node), AttentionPrecision())
    assert not applied.outcome.changed
    assert applied.model.graph.node[0] == node


def test_an_unknown_type_is_refused():
    switches = PassSwitches(only=("attention_precision",), options={"attention_precision": {"dtype": "float16"}})
    with pytest.raises(KilnError, match="attention_precision: dtype is 'float16'; expected float32 or bfloat16"):
        standard_passes(PassTarget(), switches)


def test_is_off_by_default():
    assert "attention_precision" not in [graph_pass.name for graph_pass in standard_passes(PassTarget())]
