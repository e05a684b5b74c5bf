"""Binding the attention operator: what changes, what stays, subgraphs, and equality through the real kernel."""

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
import pytest
from onnx import TensorProto, helper

from passes.bind_attention import BindAttention
from plugins.build import cpu_library
from plugins.paged_attention.reference import Attributes, Inputs, paged_attention
from plugins.paged_attention.schema import DOMAIN, EXPORT_DOMAIN, INPUTS, OP_TYPE

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 32, 4
ATTRIBUTES = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "scale": 0.25, "softcap": 20.0, "local_window_size": 6}
GIVEN = [spec for spec in INPUTS if not spec.optional or spec.name in ("key", "value")]
KINDS = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32}


def attention_node(suffix: str = "", domain: str = EXPORT_DOMAIN, op: str = OP_TYPE) -> onnx.NodeProto:
    names = [spec.name if spec in GIVEN else "" for spec in INPUTS]
    outputs = [f"output{suffix}", f"key_cache_out{suffix}", f"value_cache_out{suffix}"]
    return helper.make_node(op, names, outputs, name=f"attention{suffix}", domain=domain, **ATTRIBUTES)


def step_inputs() -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(s.name, KINDS[s.dtypes[0]], [None] * len(s.shape)) for s in GIVEN]


def model_of(nodes, inputs, outputs) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    opsets = [helper.make_opsetid(domain, version) for domain, version in (("", 21), (EXPORT_DOMAIN, 1), (DOMAIN, 1))]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def output_of(name: str = "output") -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, HEADS * HEAD_DIM])


def plain_model() -> onnx.ModelProto:
    return model_of([attention_node()], step_inputs(), [output_of()])


def branching_model() -> onnx.ModelProto:
    """The operator only inside the branches of an If, one of them nested once more."""

    def branch(suffix: str, node: onnx.NodeProto) -> onnx.GraphProto:
        return helper.make_graph([node], f"branch{suffix}", [], [output_of(node.output[0])])

    inner = helper.make_node(
        "If",
        ["flag"],
        ["output_inner"],
        then_branch=branch("_a", attention_node("_a")),
        else_branch=branch("_b", attention_node("_b")),
    )
    outer = helper.make_node(
        "If",
        ["flag"],
        ["output"],
        then_branch=branch("_c", attention_node("_c")),
        else_branch=branch("_i", inner),
    )
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, [])
    return model_of([outer], [flag, *step_inputs()], [output_of()])


def all_nodes(graph: gs.Graph) -> list[gs.Node]:
    nodes = list(graph.nodes)
    for node in graph.nodes:
        for value in node.attrs.values():
            if isinstance(value, gs.Graph):
                nodes += all_nodes(value)
    return nodes


def rewritten(model: onnx.ModelProto) -> onnx.ModelProto:
    graph = gs.import_onnx(model)
    assert BindAttention().call(graph).changed
    return gs.export_onnx(graph, do_type_check=False)


def feeds(seed: int = 0) -> dict[str, np.ndarray]:
    """Two sequences: five prompt tokens after three cached ones, and one token after six."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    return {
        "query": normal(6, HEADS * HEAD_DIM),
        "key": normal(6, KV_HEADS * HEAD_DIM),
        "value": normal(6, KV_HEADS * HEAD_DIM),
        "key_cache": normal(6, BLOCK_SIZE, KV_HEADS, HEAD_DIM),
        "value_cache": normal(6, BLOCK_SIZE, KV_HEADS, HEAD_DIM),
        "cumulative_sequence_length": np.array([0, 5, 6], np.int32),
        "past_seqlens": np.array([3, 6], np.int32),
        "block_table": np.array([[4, 1], [0, 5]], np.int32),
        "slot_mapping": np.array([19, 4, 5, 6, 7, 22], np.int32),
    }


def run(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(cpu_library()))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(["output"], inputs)[0]


def expected_output(inputs: dict[str, np.ndarray]) -> np.ndarray:
    return paged_attention(Inputs(**inputs), Attributes(**ATTRIBUTES))[0]


def test_changes_the_domain_and_nothing_else():
    before = plain_model()
    after = rewritten(before)
    node = after.graph.node[0]
    assert (node.domain, node.op_type) == (DOMAIN, OP_TYPE)
    original = before.graph.node[0]
    assert list(node.input) == list(original.input)
    assert list(node.output) == list(original.output)
    assert {a.name: helper.get_attribute_value(a) for a in node.attribute} == ATTRIBUTES
    assert [value.name for value in after.graph.input] == [value.name for value in before.graph.input]


@pytest.mark.parametrize(
    ("op", "domain"), [("Attention", EXPORT_DOMAIN), (OP_TYPE, "other.domain"), (OP_TYPE, DOMAIN), ("Identity", "")]
)
def test_leaves_other_operators_and_domains_alone(op, domain):
    graph = gs.import_onnx(model_of([attention_node(op=op, domain=domain)], step_inputs(), [output_of()]))
    assert not BindAttention().call(graph).changed
    assert [(node.op, node.domain or "") for node in graph.nodes] == [(op, domain)]


def test_binding_to_the_exported_domain_or_twice_changes_nothing():
    graph = gs.import_onnx(plain_model())
    assert not BindAttention(EXPORT_DOMAIN).call(graph).changed
    assert BindAttention().call(graph).changed
    assert not BindAttention().call(graph).changed


def test_works_inside_subgraphs_and_runs_there():
    graph = gs.import_onnx(branching_model())
    assert BindAttention().call(graph).changed
    domains = [node.domain for node in all_nodes(graph) if node.op == OP_TYPE]
    assert domains == [DOMAIN] * 3
    model = gs.export_onnx(graph, do_type_check=False)
    inputs = feeds(1)
    expected = expected_output(inputs)
    for flag in (True, False):
        found = run(model, {"flag": np.array(flag), **inputs})
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_equals_the_operators_definition_numerically():
    """The exported operator has no CPU kernel, so the original is its definition in float64."""
    with pytest.raises(Exception, match="PagedAttention"):
        run(plain_model(), feeds())
    model = rewritten(plain_model())
    for seed in range(4):
        inputs = feeds(seed)
        expected = expected_output(inputs)
        assert np.abs(run(model, inputs) - expected).max() <= 1e-5 * np.abs(expected).max()
