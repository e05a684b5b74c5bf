"""What 16-bit serving graphs become for CUDA: products, norms and attention of Kiln's, judged in the CPU's form."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from passes.bind_half_norm import BindHalfNorm
from passes.bind_linear import BindLinear
from passes.cast_attention import CastAttention
from passes.onnx_model import DECODER_METADATA, DecoderSpec
from pipeline.cpu_form import write_cpu_form
from plugins.paged_attention.schema import KvLayer, KvSpec

K, N = 40, 48
TYPES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
EPSILON = {"float16": 2e-3, "bfloat16": 2e-2}
"""Of max|y|: two roundings."""


@pytest.fixture(params=sorted(TYPES))
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


def build(body: str, given: str, made: str, dtype: str, **weights: tuple[int, ...]) -> onnx.ModelProto:
    """A model in which `half` stands for the 16-bit type, and its number for Casts."""

    def typed(text: str) -> str:
        return text.replace("half", dtype)

    number = int(TYPES[dtype])
    domains = '"": 18, "com.microsoft": 1, "kiln": 1'
    text = f"m ({typed(given)}) => ({typed(made)}) {{ {typed(body).replace('LOW', str(number))} }}"
    model = onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{domains}]> {text}")
    rng = np.random.default_rng(3)
    for name, shape in weights.items():
        values = (rng.standard_normal(shape) / 4).astype(np.float32)
        kind = TensorProto.FLOAT if name.startswith("wide") else TYPES[dtype]
        values = values.astype(helper.tensor_dtype_to_np_dtype(kind))
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    model.graph.initializer.append(numpy_helper.from_array(np.array([N // 2, N // 2]), "halves"))
    return model


@pytest.fixture
def same(tools, tmp_path: Path, dtype: str) -> Callable[..., None]:
    """Asserts that two models give the same, both in the CPU's form, on random 16-bit inputs."""

    def form(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
        folder = tmp_path / name
        folder.mkdir()
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        for direction in (copy.graph.input, copy.graph.output):  # NumPy has no BF16: the outside is FP32
            for value in direction:
                kind = value.type.tensor_type
                if kind.elem_type not in TYPES.values():
                    continue
                outside, kind.elem_type = value.name, TensorProto.FLOAT
                inside, low = f"{outside}_low", TYPES[dtype]
                for node in copy.graph.node:
                    node.input[:] = [inside if one == outside else one for one in node.input]
                    node.output[:] = [inside if one == outside else one for one in node.output]
                if direction is copy.graph.input:
                    copy.graph.node.insert(0, helper.make_node("Cast", [outside], [inside], to=low))
                else:
                    copy.graph.node.append(helper.make_node("Cast", [inside], [outside], to=TensorProto.FLOAT))
                copy.graph.value_info.append(helper.make_tensor_value_info(inside, low, None))
        onnx.save(copy, folder / "m.onnx")
        return onnx.load(write_cpu_form(folder / "m.onnx", folder))

    def check(before: onnx.ModelProto, after: onnx.ModelProto, *shape: int) -> None:
        rng = np.random.default_rng()
        feeds = {value.name: rng.standard_normal(shape).astype(np.float32) for value in before.graph.input}
        tools.same_outputs(form(before, "before"), form(after, "after"), feeds, EPSILON[dtype])

    return check


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_becomes_linear(tools, same, dtype, bias) -> None:
    body = "t = MatMul(x, w) y = Add(t, b)" if bias else "y = MatMul(x, w)"
    weights = {"w": (K, N), "b": (N,)} if bias else {"w": (K, N)}
    model = build(body, f"half[T,{K}] x", f"half[T,{N}] y", dtype, **weights)
    applied = tools.apply(model, BindLinear(rows=16))
    assert applied.ops == ["kiln::Linear"]
    node = applied.model.graph.node[0]
    assert helper.get_attribute_value(node.attribute[0]) == 16
    assert len(node.input) == 2 + bias
    stored = {t.name: list(t.dims) for t in applied.model.graph.initializer}
    assert stored[node.input[1]] == [N, K]
    same(model, applied.model, 5, K)


@pytest.mark.parametrize("turn", ["Transpose", "Transpose<perm = [1, 0]>"])
def test_a_weight_that_is_turned_in_the_graph_is_taken_before(tools, same, dtype, turn) -> None:
    model = build(f"t = {turn}(w) y = MatMul(x, t)", f"half[T,{K}] x", f"half[T,{N}] y", dtype, w=(N, K))
    applied = tools.apply(model, BindLinear())
    assert applied.ops == ["kiln::Linear"]
    assert applied.model.graph.node[0].input[1] == "w"
    same(model, applied.model, 5, K)


def test_gate_and_up_become_one_product(tools, same, dtype) -> None:
    body = (
        "p = MatMul(x, w) g, u = Split<axis = -1>(p, halves) s = com.microsoft.QuickGelu<alpha = 1.0>(g) y = Mul(u, s)"
    )
    model = build(body, f"half[T,{K}] x", f"half[T,{N // 2}] y", dtype, w=(K, N))
    applied = tools.apply(model, BindLinear())
    assert applied.ops == ["kiln::LinearSwiGlu"]
    same(model, applied.model, 7, K)


@pytest.mark.parametrize(
    ("body", "weights", "left"),
    [
        ("y = MatMul(x, w)", {"w": (36, N)}, "MatMul"),  # a depth that is no multiple of 8
        ("y = MatMul(x, w)", {"w": (3, K, N)}, "MatMul"),
        ("t = Transpose<perm = [1, 0]>(x) y = MatMul(x, t)", {}, "MatMul"),
        ("t = Transpose(w) y = MatMul(x, t)", {"w": (N, 36)}, "MatMul"),
        ("t = Transpose<perm = [0, 1]>(w) y = MatMul(x, t)", {"w": (36, N)}, "MatMul"),
    ],
)
def test_products_that_are_left_alone(tools, dtype, body, weights, left) -> None:
    depth = K if not weights else 36 if "Transpose" in body else next(iter(weights.values()))[-2]
    applied = tools.apply(build(body, f"half[T,{depth}] x", "half[M,N] y", dtype, **weights), BindLinear())
    assert left in applied.ops
    assert not applied.outcome.changed


def test_float_products_stay(tools) -> None:
    model = build("y = MatMul(x, wide)", f"float[T,{K}] x", f"float[T,{N}] y", "float16", wide=(K, N))
    assert not tools.apply(model, BindLinear()).outcome.changed


def test_another_gate_keeps_its_split(tools, same, dtype) -> None:
    body = (
        "p = MatMul(x, w) g, u = Split<axis = -1>(p, halves) "
        "s = com.microsoft.QuickGelu<alpha = 1.702>(g) y = Mul(u, s)"
    )
    model = build(body, f"half[T,{K}] x", f"half[T,{N // 2}] y", dtype, w=(K, N))
    applied = tools.apply(model, BindLinear())
    assert applied.ops[0] == "kiln::Linear"
    assert "com.microsoft::QuickGelu" in applied.ops
    same(model, applied.model, 3, K)


def test_linear_inside_a_branch(tools, dtype) -> None:
    model = tools.in_branch(build("y = MatMul(x, w)", f"half[T,{K}] x", f"half[T,{N}] y", dtype, w=(K, N)))
    assert tools.apply(model, BindLinear()).ops == ["If", "kiln::Linear", "kiln::Linear"]


NORM = "SimplifiedLayerNormalization<axis = -1, epsilon = 0.01>"


def norm_of(total: str, more: str = "") -> str:
    return f"{total} w = Cast<to = 1>(t) n = {NORM}(w, wide) c = Cast<to = LOW>(n) y = Identity(c) {more}"


def test_a_residual_and_its_norm_become_one(tools, same, dtype) -> None:
    given, made = f"half[T,{K}] x, half[T,{K}] k", f"half[T,{K}] y, half[T,{K}] r"
    model = build(norm_of("t = Add(x, k)", "r = Identity(t)"), given, made, dtype, wide=(K,))
    applied = tools.apply(model, BindHalfNorm(dtype))
    assert applied.ops == ["kiln::AddRmsNorm", "Identity", "Identity"]
    same(model, applied.model, 6, K)


def test_a_norm_alone_takes_sixteen_bits(tools, same, dtype) -> None:
    model = build(norm_of("t = Identity(x)"), f"half[T,{K}] x", f"half[T,{K}] y", dtype, wide=(K,))
    applied = tools.apply(model, BindHalfNorm(dtype))
    assert applied.ops == ["Identity", "SimplifiedLayerNormalization", "Identity"]
    same(model, applied.model, 4, K)


def test_a_norm_that_is_wanted_in_float_stays(tools, dtype) -> None:
    body = norm_of("t = Add(x, k)", "z = Neg(n)")
    given, made = f"half[T,{K}] x, half[T,{K}] k", f"half[T,{K}] y, float[T,{K}] z"
    assert not tools.apply(build(body, given, made, dtype, wide=(K,)), BindHalfNorm(dtype)).outcome.changed


DECODER = DecoderSpec(KvSpec((KvLayer(1, 64),), 16, "float32"), 10, 64, (0,))
ATTEND = (
    "a, key_cache_out_0, value_cache_out_0 = kiln.PagedAttention<num_heads = 1, kv_num_heads = 1>"
    "(q, k, v, key_cache_0, value_cache_0, cu, past, table, , , slots)"
)
CACHES = "float[B,16,1,64] {0}, float[B,16,1,64] {1}"


def attention(read: str, make: str, given: str, made: str, dtype: str) -> onnx.ModelProto:
    indices = "int32[S1] cu, int32[S] past, int32[S,M] table, int32[T] slots"
    inputs = f"{given}, {CACHES.format('key_cache_0', 'value_cache_0')}, {indices}"
    outputs = f"{made}, {CACHES.format('key_cache_out_0', 'value_cache_out_0')}"
    model = build(f"{read} {ATTEND} {make}", inputs, outputs, dtype)
    model.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, ["T", 64]))
    for value in (*model.graph.input, *model.graph.output):  # the parser takes no dots
        value.name = value.name.replace("_0", ".0")
    for node in model.graph.node:
        node.input[:] = [name.replace("_0", ".0") for name in node.input]
        node.output[:] = [name.replace("_0", ".0") for name in node.output]
    return model


def test_attention_and_its_cache_take_sixteen_bits(tools, dtype) -> None:
    read = "q = Cast<to = 1>(x) k = Cast<to = 1>(x) v = Cast<to = 1>(x)"
    model = attention(read, "y = Cast<to = LOW>(a)", "half[T,64] x", "half[T,64] y", dtype)
    applied = tools.apply(model, CastAttention(DECODER, dtype))
    assert [op for op in applied.ops if op != "Cast"] == ["kiln::PagedAttention"]
    node = next(node for node in applied.model.graph.node if node.op_type == "PagedAttention")
    assert list(node.input[:3]) == ["x"] * 3
    kinds = {value.name: value.type.tensor_type.elem_type for value in applied.model.graph.input}
    assert kinds["key_cache.0"] == kinds["value_cache.0"] == TYPES[dtype]
    described = DecoderSpec.from_json(applied.outcome.metadata[DECODER_METADATA])
    assert described.kv.dtype == dtype


def test_attention_of_a_float_graph_is_cast_around(tools, dtype) -> None:
    read = "q = Neg(x) k = Identity(x) v = Identity(x)"
    model = attention(read, "y = Neg(a)", "float[T,64] x", "float[T,64] y", dtype)
    applied = tools.apply(model, CastAttention(DECODER, dtype))
    assert applied.ops.count("Cast") == 4
    kinds = {value.name: value.type.tensor_type.elem_type for value in applied.model.graph.output}
    assert kinds["y"] == TensorProto.FLOAT


def test_without_a_decoder_nothing_is_cast(tools, dtype) -> None:
    model = attention("q = Neg(x) k = Neg(x) v = Neg(x)", "y = Neg(a)", "float[T,64] x", "float[T,64] y", dtype)
    assert not tools.apply(model, CastAttention(None, dtype)).outcome.changed


@pytest.mark.parametrize("make", [BindHalfNorm, lambda kind: CastAttention(DECODER, kind)])
def test_other_types_are_refused(make) -> None:
    with pytest.raises(ValueError, match="expected float16 or bfloat16"):
        make("float8")


def test_rows_beyond_the_kernels_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 to 32"):
        BindLinear(rows=33)
