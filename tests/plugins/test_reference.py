"""The float64 reference against onnxruntime's GroupQueryAttention, which was written by others."""

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from plugins.paged_attention.reference import Attributes, Inputs, attention, paged_attention, quantized, written


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("rotary_dim", [0, 16, 32])
@pytest.mark.parametrize(("window", "softcap", "scale"), [(-1, 0.0, 0.0), (7, 0.0, 0.3), (-1, 2.0, 0.0)])
def test_reference_equals_group_query_attention_on_a_prompt(
    interleaved: int, rotary_dim: int, window: int, softcap: float, scale: float
) -> None:
    rng = np.random.default_rng(5)
    tokens, heads, kv_heads, dim, block = 21, 6, 2, 32, 4
    query = rng.standard_normal((tokens, heads * dim)).astype(np.float32)
    key, value = rng.standard_normal((2, tokens, kv_heads * dim)).astype(np.float32)
    angles = rng.uniform(0, 7, (64, max(rotary_dim, 16) // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    attributes = Attributes(heads, kv_heads, scale, softcap, window, int(rotary_dim > 0), interleaved)
    table = rng.permutation(6).astype(np.int32)[None]
    positions = np.arange(tokens)
    inputs = Inputs(
        query,
        key,
        value,
        *(np.full((6, block, kv_heads, dim), np.nan, np.float32) for _ in range(2)),
        np.array([0, tokens], np.int32),
        np.array([0], np.int32),
        table,
        (table[0, positions // block] * block + positions % block).astype(np.int32),
        cos if rotary_dim else None,
        sin if rotary_dim else None,
    )
    output, keys, _ = paged_attention(inputs, attributes)

    theirs, their_keys = _group_query_attention(attributes, query, key, value, cos, sin)
    np.testing.assert_allclose(output, theirs[0], rtol=0, atol=3e-6)
    ours = keys[table[0, positions // block], positions % block].swapaxes(0, 1)
    np.testing.assert_allclose(ours, their_keys[0, :, :tokens], rtol=0, atol=2e-6)


def test_quantized_rows_are_within_half_a_step() -> None:
    rows = np.random.default_rng(1).standard_normal((40, 3, 64)).astype(np.float32)
    levels, scales = quantized(rows)
    assert levels.dtype == np.int8
    assert (np.abs(levels).max(axis=-1) == 127).all()
    assert (np.abs(levels * scales[..., None] - rows) <= scales[..., None] * 0.5001).all()


def test_attention_over_int8_caches_equals_attention_over_what_they_stand_for() -> None:
    rng = np.random.default_rng(2)
    tokens, dim, block = 9, 16, 4
    normal = rng.standard_normal((3, tokens, 2 * dim)).astype(np.float32)
    caches = [np.zeros((3, block, 2, dim), np.int8) for _ in range(2)]
    scales = [np.zeros((3, block, 2), np.float32) for _ in range(2)]
    lengths = np.array([0, tokens], np.int32), np.array([0], np.int32)
    table, slots = np.array([[2, 0, 1]], np.int32), np.array([8, 9, 10, 11, 0, 1, 2, 3, 4], np.int32)
    inputs = Inputs(*normal, *caches, *lengths, table, slots, k_scale=scales[0], v_scale=scales[1])
    attributes = Attributes(2, 2)
    after = written(inputs, attributes)
    assert not caches[0].any()
    plain = Inputs(
        *normal,
        *(
            c * s[..., None].astype(np.float64)
            for c, s in ((after.key_cache, after.k_scale), (after.value_cache, after.v_scale))
        ),
        *lengths,
        table,
        slots,
    )
    np.testing.assert_allclose(attention(after, attributes), attention(plain, attributes), rtol=1e-12)
    exact = paged_attention(
        Inputs(*normal, *(np.zeros((3, block, 2, dim), np.float32) for _ in range(2)), *lengths, table, slots),
        attributes,
    )[0]
    assert 1e-4 < np.abs(attention(after, attributes) - exact).max() < 5e-2


def _group_query_attention(
    a: Attributes, query: np.ndarray, key: np.ndarray, value: np.ndarray, cos: np.ndarray, sin: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    tokens, dim = len(query), query.shape[1] // a.num_heads
    empty = np.zeros((1, a.kv_num_heads, 0, dim), np.float32)
    feeds = {
        "query": query[None],
        "key": key[None],
        "value": value[None],
        "past_key": empty,
        "past_value": empty,
        "seqlens_k": np.array([tokens - 1], np.int32),
        "total": np.array(tokens, np.int32),
        "cos": cos,
        "sin": sin,
    }
    node = helper.make_node(
        "GroupQueryAttention",
        list(feeds),
        ["output", "present_key", "present_value"],
        domain="com.microsoft",
        num_heads=a.num_heads,
        kv_num_heads=a.kv_num_heads,
        scale=a.scale,
        softcap=a.softcap,
        local_window_size=a.local_window_size,
        do_rotary=a.do_rotary,
        rotary_interleaved=a.rotary_interleaved,
    )
    types = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int32): TensorProto.INT32}
    graph = helper.make_graph(
        [node],
        "theirs",
        [helper.make_tensor_value_info(n, types[v.dtype], v.shape) for n, v in feeds.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in node.output],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    output, keys, _ = session.run(None, feeds)
    return output, keys
