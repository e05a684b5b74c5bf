"""Which nodes stay in FP32: norm statistics, masks, positions, weights that 16 bits cannot hold, paged attention."""

import numpy as np
import onnx
import pytest

from passes.cast_precision import CastPrecision
from tests.passes.cast_models import FLOAT, HALF, casts, low_ops, model_of, normal, types_of


def test_decomposed_rms_norm_is_an_island(tools):
    before = model_of(
        """g (float[4, 8] x) => (float[4, 8] y) {
            h = MatMul (x, w)
            q = Pow (h, two)
            m = ReduceMean (q, axes)
            a = Add (eps, m)
            s = Sqrt (a)
            r = Reciprocal (s)
            n = Mul (r, h)
            t = Mul (scale, n)
            y = MatMul (t, w)
        }""",
        w=normal(8, 8),
        two=np.float32(2),
        eps=np.float32(1e-6),
        axes=np.array([-1]),
        scale=normal(8),
    )
    applied = tools.apply(before, CastPrecision("float16"))
    assert low_ops(applied) == ["MatMul", "Mul", "MatMul"]
    tools.same_outputs(before, applied.model, {"x": normal(4, 8, seed=3) * 1e-2}, 1e-2)


def test_decomposed_layer_norm_is_an_island_with_its_centring(tools):
    before = model_of(
        """g (float[4, 8] x) => (float[4, 8] y) {
            h = MatMul (x, w)
            mean = ReduceMean (h, axes)
            d = Sub (h, mean)
            q = Mul (d, d)
            v = ReduceMean (q, axes)
            a = Add (v, eps)
            s = Sqrt (a)
            n = Div (d, s)
            y = MatMul (n, w)
        }""",
        w=normal(8, 8),
        eps=np.float32(1e-12),
        axes=np.array([-1]),
    )
    assert low_ops(tools.apply(before, CastPrecision("float16"))) == ["MatMul", "MatMul"]


def test_a_mean_of_no_squares_is_cast(tools):
    before = model_of(
        "g (float[4, 8] x) => (float[4, 1] y) { h = MatMul (x, w) y = ReduceMean (h, axes) }",
        w=normal(8, 8),
        axes=np.array([-1]),
    )
    assert low_ops(tools.apply(before, CastPrecision("float16"))) == ["MatMul", "ReduceMean"]


@pytest.mark.parametrize("spelling", ["m = Where (keep, zero, least)", "k = Cast <to = 1> (keep) m = Mul (k, least)"])
def test_masks_stay_and_masked_rows_stay_finite(tools, spelling):
    before = model_of(
        f"""g (float[2, 4, 8] x, bool[4, 4] keep) => (float[2, 4, 8] y) {{
            q = MatMul (x, w)
            t = Transpose <perm = [0, 2, 1]> (x)
            s = MatMul (q, t)
            {spelling}
            u = Unsqueeze (m, axes)
            z = Mul (s, scale)
            a = Add (u, z)
            p = Softmax (a)
            y = MatMul (p, x)
        }}""",
        w=normal(8, 8),
        zero=np.float32(0),
        least=np.float32(np.finfo(np.float32).min),
        scale=np.float32(0.3),
        axes=np.array([0]),
    )
    applied = tools.apply(before, CastPrecision("float16"))
    assert low_ops(applied) == ["MatMul", "Transpose", "MatMul", "MatMul"]
    keep = np.tri(4, dtype=bool)
    keep[2] = "Where" not in spelling  # one row is masked entirely
    tools.same_outputs(before, applied.model, {"x": normal(2, 4, 8, seed=5), "keep": keep}, 1e-2)


def test_positions_and_angles_stay(tools):
    before = model_of(
        """g (float[6, 8] x, int64[6] ids) => (float[6, 8] y) {
            i = Unsqueeze (ids, axes)
            f = Cast <to = 1> (i)
            a = Mul (f, freq)
            c = Cos (a)
            h = MatMul (x, w)
            r = Mul (h, c)
            y = MatMul (r, w)
        }""",
        freq=np.geomspace(1, 1e-4, 8, dtype=np.float32),
        axes=np.array([1]),
        w=normal(8, 8),
    )
    applied = tools.apply(before, CastPrecision("float16"))
    assert low_ops(applied) == ["MatMul", "Mul", "MatMul"]
    feeds = {"x": normal(6, 8, seed=2), "ids": np.arange(4001, 4007)}  # FP16 counts to 2048
    tools.same_outputs(before, applied.model, feeds, 1e-2)


def test_a_network_on_integer_pixels_is_no_index_arithmetic(tools):
    before = model_of(
        """g (uint8[1, 3, 8, 8] x) => (float[1, 4, 6, 6] y) {
            f = Cast <to = 1> (x)
            n = Div (f, most)
            c = Conv (n, w)
            y = Relu (c)
        }""",
        most=np.float32(255),
        w=normal(4, 3, 3, 3),
    )
    assert low_ops(tools.apply(before, CastPrecision("float16"))) == ["Conv", "Relu"]


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (np.array([[7e4, 1], [1, 1]], np.float32), "constant 'w' holds 7e+04, beyond float16"),
        (np.full((2, 2), 1e-8, np.float32), "constant 'w' would lose 100.0% of its magnitude to underflow"),
    ],
)
def test_weights_that_16_bits_cannot_hold(tools, weight, says):
    before = model_of("g (float[2, 2] x) => (float[2, 2] y) { a = MatMul (x, w) y = MatMul (a, v) }")
    before.graph.initializer.extend([onnx.numpy_helper.from_array(weight, "w")])
    before.graph.initializer.extend([onnx.numpy_helper.from_array(normal(2, 2), "v")])
    applied = tools.apply(before, CastPrecision("float16"))
    assert low_ops(applied) == ["MatMul"]
    assert applied.outcome.notes == [f"node a (MatMul): {says}: kept in FP32"]
    assert not tools.apply(before, CastPrecision("bfloat16")).outcome.notes


def test_a_few_tiny_weights_do_no_harm(tools):
    weight = normal(8, 8)
    weight[:, :3] = 1e-12
    before = model_of("g (float[2, 8] x) => (float[2, 8] y) { y = MatMul (x, w) }", w=weight)
    assert low_ops(tools.apply(before, CastPrecision("float16"))) == ["MatMul"]


def test_attention_with_a_cache_is_an_island(tools):
    before = model_of(
        """g (float[T, 8] x, float[B, 4, 1, 8] kc, float[B, 4, 1, 8] vc, int32[S] cu, int32[P] past, int32[P, M] table,
            int32[T] slots) => (float[T, 8] y, float[B, 4, 1, 8] kn, float[B, 4, 1, 8] vn)
        <float[T, 8] o> {
            q = MatMul (x, w)
            o, kn, vn = kiln.PagedAttention <num_heads = 1, kv_num_heads = 1> (
                q, q, q, kc, vc, cu, past, table, , , slots)
            y = MatMul (o, w)
        }""",
        w=normal(8, 8),
    )
    applied = tools.apply(before, CastPrecision("float16", keep_io=False))
    types = types_of(applied.model)
    assert {types[name] for name in ("kc", "vc", "kn", "vn", "o")} == {FLOAT}
    assert types["x"] == types["q"] == types["y"] == HALF
    assert casts(applied) == {FLOAT: 1, HALF: 1}


def test_attention_keeps_its_softmax_in_fp32(tools):
    before = model_of(
        "g (float[1, 2, 4, 8] x) => (float[1, 2, 4, 8] y) { a = Attention (x, x, x) y = Relu (a) }", opset=23
    )
    applied = tools.apply(before, CastPrecision("float16"))
    node = next(node for node in applied.model.graph.node if node.op_type == "Attention")
    assert {a.name: a.i for a in node.attribute} == {"softmax_precision": FLOAT}
