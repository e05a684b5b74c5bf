"""Folding: what is computed at build time, what stays, in all scopes; weights above 2 GB stay in their file."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from onnx_graphsurgeon.ir.tensor import LazyValues

from passes.fold_constants import FoldConstants
from passes.graph import graph_from_path, graph_from_proto
from passes.shapes import infer_shapes
from passes.weights import FileValues

RNG = np.random.default_rng(0)


def model_of(signature: str, body: str, opset: int = 17, **constants: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}, "other" : 1]> graph {signature} {{ {body} }}'
    )
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items())
    return model


def initializer(model: onnx.ModelProto, name: str) -> np.ndarray:
    return numpy_helper.to_array(next(tensor for tensor in model.graph.initializer if tensor.name == name))


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


# Rule 1


CHAIN = """
    transposed = Transpose <perm = [1, 0]> (weight)
    scaled = Mul (transposed, scale)
    y = MatMul (x, scaled)
"""


@pytest.mark.parametrize("inside", [False, True])
def test_a_chain_of_constants_becomes_one(tools, inside):
    model = model_of("(float[n, 4] x) => (float[n, 3] y)", CHAIN, weight=floats(3, 4), scale=np.float32(2))
    feeds = {"x": floats(5, 4)}
    if inside:
        model, feeds = tools.in_branch(model), {**feeds, "flag": np.array(True)}
    result = tools.apply(model, FoldConstants())
    assert result.ops == (["If", "MatMul", "MatMul"] if inside else ["MatMul"])
    assert result.outcome.rewrites == (4 if inside else 2)
    tools.same_outputs(model, result.model, feeds)


def test_scalars_keep_rank_zero(tools):
    model = model_of("(float[n] x) => (float[n] y)", "s = Add (a, a) y = Mul (x, s)", a=np.float32(1.5))
    result = tools.apply(model, FoldConstants())
    folded = initializer(result.model, "s/folded")
    assert folded.shape == ()
    assert folded == 3


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_computed_wide_and_rounded_once(tools, dtype):
    kind = "float16" if dtype == np.float16 else "bfloat16"
    weight, bias = RNG.standard_normal((2, 500)).astype(dtype), np.ones((2, 1), dtype)
    body = "sum = ReduceSum <keepdims = 1> (weight, axis) half = Mul (sum, bias) y = Add (x, half)"
    model = model_of(
        f"({kind}[2, n] x) => ({kind}[2, n] y)", body, weight=weight, bias=bias, axis=np.array([1], np.int64)
    )
    result = tools.apply(model, FoldConstants())
    folded = initializer(result.model, "half/folded")
    assert folded.dtype == dtype
    expected = weight.astype(np.float64).sum(1, keepdims=True).astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(folded.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize(
    ("kind", "code", "dtype"),
    [
        ("float16", 10, np.float16),
        ("bfloat16", 16, ml_dtypes.bfloat16),
        ("double", 11, np.float64),
        ("int64", 7, np.int64),
        ("int8", 3, np.int8),
        ("bool", 9, np.bool_),
    ],
)
def test_element_types_are_kept(tools, kind, code, dtype):
    model = model_of(
        f"({kind}[3] x, bool[1] c) => ({kind}[3] y)",
        f"cast = Cast <to = {code}> (w) y = Where (c, cast, x)",
        w=np.array([0, 1, 2.7], np.float32),
    )
    result = tools.apply(model, FoldConstants())
    folded = initializer(result.model, "cast/folded")
    assert result.ops == ["Where"]
    assert folded.dtype == dtype
    np.testing.assert_array_equal(folded, np.array([0, 1, 2.7], np.float32).astype(dtype))


def test_a_graph_output_keeps_its_name(tools):
    model = model_of("(float[2] x) => (float[2] y, float[2] c)", "c = Neg (w) y = Add (x, c)", w=floats(2))
    result = tools.apply(model, FoldConstants())
    assert sorted(result.ops) == ["Add", "Identity"]
    tools.same_outputs(model, result.model, {"x": floats(2)})


def test_every_output_of_a_node_is_folded(tools):
    body = "a, b = Split <axis = 0> (w) s = Add (x, a) y = Mul (s, b)"
    model = model_of("(float[n, 4] x) => (float[n, 4] y)", body, w=floats(2, 4))
    result = tools.apply(model, FoldConstants())
    assert result.ops == ["Add", "Mul"]
    tools.same_outputs(model, result.model, {"x": floats(3, 4)})


LARGE = floats(600, 600)  # 1.4 MB, above the default limit


@pytest.mark.parametrize(
    ("body", "ops"),
    [
        ("t = Transpose (w) y = MatMul (x, t)", ["MatMul"]),  # replaces the weight by as much
        ("t = Transpose (w) a = MatMul (x, t) y = MatMul (a, w)", ["Transpose", "MatMul", "MatMul"]),  # another reader
        ("t = Expand (small, shape) y = MatMul (x, t)", ["Expand", "MatMul"]),
        ("t = Tile (small, shape) y = MatMul (x, t)", ["Tile", "MatMul"]),
        ("t = ConstantOfShape (shape) y = MatMul (x, t)", ["ConstantOfShape", "MatMul"]),
        ("r = Range (zero, many, one) c = Cast <to = 1> (r) y = Mul (x, c)", ["Range", "Cast", "Mul"]),
        ("d = Cast <to = 11> (w) t = Cast <to = 1> (d) y = MatMul (x, t)", ["Cast", "Cast", "MatMul"]),
    ],
)
def test_large_results_must_replace_as_much(tools, body, ops):
    model = model_of(
        "(float[600, 600] x) => (float[m, k] y)",
        body,
        w=LARGE,
        small=floats(1, 1),
        shape=np.array([600, 600], np.int64),
        zero=np.int64(0),
        one=np.int64(1),
        many=np.int64(2**20),
    )
    assert tools.apply(model, FoldConstants()).ops == ops


def test_the_limit_is_an_option(tools):
    body = "t = Expand (small, shape) y = Mul (x, t)"
    model = model_of("(float[m, n] x) => (float[m, n] y)", body, small=floats(1, 1), shape=np.array([16, 16], np.int64))
    assert tools.apply(model, FoldConstants(size_limit=1024)).ops == ["Mul"]
    assert tools.apply(model, FoldConstants(size_limit=1023)).ops == ["Expand", "Mul"]


@pytest.mark.parametrize(
    "body",
    [
        "r = RandomNormal <shape = [2, 2]> () y = Add (x, r)",
        "r = RandomUniformLike (w) y = Add (x, r)",
        "r = Bernoulli (p) y = Add (x, r)",
        "m = Multinomial <sample_size = 2, dtype = 6> (p) r = Cast <to = 1> (m) y = Add (x, r)",
        "r, mask = Dropout (w, ratio, train) y = Add (x, r)",
        "r = DequantizeLinear (q, scale, zero) y = Add (x, r)",
        "r = QuantizeLinear (w, scale, zero) z = DequantizeLinear (r, scale, zero) y = Add (x, z)",
        "r = other.Something (w) y = Add (x, r)",
    ],
)
def test_random_quantising_and_foreign_operators_stay(tools, body):
    model = model_of(
        "(float[2, 2] x) => (float[2, 2] y)",
        body,
        w=floats(2, 2),
        p=np.full((2, 2), 0.5, np.float32),
        q=np.ones((2, 2), np.int8),
        scale=np.float32(0.1),
        zero=np.int8(0),
        ratio=np.float32(0.5),
        train=np.array(True),
    )
    before = [node.op_type for node in model.graph.node]
    result = tools.apply(model, FoldConstants())
    kept = [op.removeprefix("other::") for op in result.ops]
    # what follows a random node depends on it
    assert kept == before
    assert not result.outcome.changed


def test_strings_stay(tools):
    model = model_of("(int64 i) => (string y)", "t = Identity (s) c = Concat <axis = 0> (t, s) y = Gather (c, i)")
    model.graph.initializer.append(onnx.helper.make_tensor("s", onnx.TensorProto.STRING, [2], [b"a", b"b"]))
    result = tools.apply(model, FoldConstants())
    assert result.ops == ["Concat", "Gather"]
    assert not result.outcome.notes


def test_a_failed_computation_is_noted(tools):
    model = model_of(
        "(float[2] x) => (float[2] y)", "g = Gather (w, i) y = Mul (x, g)", w=floats(2), i=np.array([5], np.int64)
    )
    result = tools.apply(model, FoldConstants())
    assert result.ops == ["Gather", "Mul"]
    assert "g (Gather): its value cannot be computed (IndexError" in result.outcome.notes[0]


# Rule 2


def test_identities_of_constants_share_the_weight(tools):
    body = "a = Identity (w) s = MatMul (x, a) y = MatMul (s, w)"
    model = model_of("(float[n, 600] x) => (float[n, 600] y)", body, w=LARGE)
    result = tools.apply(model, FoldConstants())
    assert result.ops == ["MatMul", "MatMul"]
    assert [tensor.name for tensor in result.model.graph.initializer] == ["w"]


# Weights on disk


def test_weights_above_two_gigabytes_stay_in_their_file(tmp_path):
    rows = 2**29 + 2**20  # 4 bytes each, 2.1 GB; the file is a hole
    body = """
        shape = Shape (x) last = Gather (shape, one) target = Concat <axis = 0> (minus, last)
        flat = Reshape (x, target) small = Mul (scale, scale) scaled = Mul (flat, small)
        rows = Gather (weight, ids) y = Add (scaled, rows)
    """
    constants = {"one": np.array([1], np.int64), "minus": np.array([-1], np.int64), "scale": floats(4)}
    model = model_of("(float[n, 4] x, int64[n] ids) => (float[n, 4] y)", body, **constants)
    weight = model.graph.initializer.add(name="weight", data_type=1, dims=[rows // 4, 4])
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="weights.data")
    with (tmp_path / "weights.data").open("wb") as stream:
        stream.truncate(4 * rows)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    graph = graph_from_path(tmp_path / "model.onnx")
    infer_shapes(graph)
    assert FoldConstants().call(graph).rewrites == 3
    graph.cleanup()
    assert [node.op for node in graph.nodes] == ["Reshape", "Mul", "Gather", "Add"]
    tensor = next(node.inputs[0] for node in graph.nodes if node.op == "Gather")
    assert isinstance(tensor._values, FileValues)
    assert (tmp_path / "weights.data").stat().st_blocks == 0


def test_inference_leaves_folded_weights_as_they_are():
    model = model_of("(float[n, 600] x) => (float[n, 600] y)", "t = Transpose (w) y = MatMul (x, t)", w=LARGE)
    graph = graph_from_proto(model)
    infer_shapes(graph)
    FoldConstants().call(graph)
    tensor = graph.nodes[-1].inputs[1]
    assert not isinstance(tensor._values, LazyValues)
    np.testing.assert_array_equal(tensor.values, LARGE.T)


CAST_LIKE = """<ir_version: 10, opset_import: ["" : 21]>
main (float16[2] x, float[2] z) => (float16[2] y, float16[2] w) {
    one = Constant <value_float = 1.0> ()
    half = CastLike(one, x)
    y = Add(x, half)
    w = CastLike(z, x)
}"""


@pytest.mark.parametrize("branched", [False, True])
def test_a_cast_like_a_known_type_is_a_cast(tools, branched):
    model = parser.parse_model(CAST_LIKE)
    model = tools.in_branch(model) if branched else model
    applied = tools.apply(model, FoldConstants())
    assert "CastLike" not in applied.ops
    assert applied.ops.count("Cast") == (2 if branched else 1)
    feeds = {"x": np.array([1, 2], np.float16), "z": np.array([0.1, 7], np.float32)}
    tools.same_outputs(model, applied.model, {**feeds, "flag": np.array(True)} if branched else feeds)
