"""ONNX Runtime with the real CPU plugin on a tiny serving graph, and plain models."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from engines.backends.base import StepInputs
from engines.backends.onnxruntime import OnnxRuntimeDecoder, OnnxRuntimeModel
from engines.runtime.score import score
from plugins.errors import KilnError
from plugins.paged_attention.schema import KvLayer, KvSpec

TOKENS = [int(t) for t in np.random.default_rng(5).integers(1, 61, 100)]


@pytest.fixture(scope="module")
def decoder(tiny_model, cpu_plugin):
    model = tiny_model()
    backend = OnnxRuntimeDecoder(model.path, model.kv, 40, plugins=[cpu_plugin], threads=2)
    yield backend
    backend.close()


def one_sequence(tokens, past=0, blocks=range(40)) -> StepInputs:
    """A step of one sequence whose blocks are given in order."""
    positions = np.arange(past, past + len(tokens), dtype=np.int32)
    table = np.array([list(blocks)[: (past + len(tokens) - 1) // 8 + 1]], np.int32)
    return StepInputs(
        input_ids=np.array(tokens, np.int32),
        position_ids=positions,
        logits_indices=np.arange(len(tokens), dtype=np.int32),
        cumulative_sequence_length=np.array([0, len(tokens)], np.int32),
        past_seqlens=np.array([past], np.int32),
        block_table=table,
        slot_mapping=table[0][positions // 8] * 8 + positions % 8,
    )


def relative_error(found, expected) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("float16", 2e-3), ("bfloat16", 2e-2)])
def test_logits_equal_the_model_in_float64(tiny_model, cpu_plugin, dtype, limit):
    model = tiny_model(dtype)
    backend = OnnxRuntimeDecoder(model.path, model.kv, 20, plugins=[cpu_plugin])
    expected = model.logits(TOKENS)
    for chunk in (100, 7, 1):
        found = np.concatenate(list(score(backend, TOKENS, chunk)))
        assert found.dtype == np.float32
        assert relative_error(found, expected) < limit, chunk
    backend.close()


def test_caches_are_updated_in_place(decoder):
    before = decoder.cache_addresses
    assert all(address % 64 == 0 for address in before.values())
    assert len(set(before.values())) == 4
    for _ in range(3):
        decoder.step(one_sequence(TOKENS[:20]))
        *bound, logits = decoder._binding.get_outputs()  # in the order of binding
        assert [value.data_ptr() for value in bound] == list(before.values())
        assert logits.shape() == [20, decoder.vocab_size]
        assert decoder.cache_addresses == before


def test_a_step_writes_its_slots_and_nothing_else(tiny_model, cpu_plugin):
    model = tiny_model()
    backend = OnnxRuntimeDecoder(model.path, model.kv, 10, plugins=[cpu_plugin])
    caches = {name: value.numpy() for name, value in backend._caches.items()}
    assert not any(cache.any() for cache in caches.values())
    backend.step(one_sequence(TOKENS[:11], blocks=[6, 3]))
    for value in backend._caches.values():
        written = np.abs(value.numpy()).sum(axis=(2, 3)) > 0
        assert written[6].all()
        assert written[3].tolist() == [True] * 3 + [False] * 5
        assert written.sum() == 11
    backend.close()


def test_logits_belong_to_the_caller(decoder):
    first = decoder.step(one_sequence(TOKENS[:9]))
    kept = first.copy()
    second = decoder.step(one_sequence(TOKENS[9:18]))
    assert (first == kept).all()
    assert not np.shares_memory(first, second)
    assert first.flags.writeable
    assert first.shape == (9, decoder.vocab_size)


def test_a_step_without_logits(decoder):
    inputs = one_sequence(TOKENS[:9])
    silent = StepInputs(**{**inputs.__dict__, "logits_indices": np.empty(0, np.int32)})
    assert decoder.step(silent).shape == (0, decoder.vocab_size)


def test_closed_backends_refuse_and_close_again(tiny_model, cpu_plugin):
    model = tiny_model()
    backend = OnnxRuntimeDecoder(model.path, model.kv, 2, plugins=[cpu_plugin])
    backend.close()
    backend.close()
    with pytest.raises(RuntimeError, match="closed"):
        backend.step(one_sequence(TOKENS[:2]))


def test_scoring_says_how_much_fits(decoder):
    with pytest.raises(KilnError, match="321 tokens need 41 cache blocks of 8 tokens, the engine has 40"):
        score(decoder, [1] * 321)
    with pytest.raises(ValueError, match="0 tokens"):
        score(decoder, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_blocks": 0}, "0 blocks; expected at least 1"),
        ({"num_blocks": 10**9}, r"need \d+\.\d\d GiB, this machine has"),
        ({"threads": 0}, "threads is 0; expected at least 1"),
        ({"provider": "CUDAExecutionProvider"}, "for now, found provider CUDAExecutionProvider"),
        ({"plugins": []}, "cannot load .*PagedAttention.*pass the libraries of its custom operators"),
        ({"kv": KvSpec((KvLayer(2, 32),), 8, "float32")}, "cache of 1 layers.*has key_cache.1, value_cache.1 besides"),
        ({"kv": KvSpec((KvLayer(2, 32),) * 2, 16, "float32")}, r"the cache layout says float32 \[blocks, 16, 2, 32\]"),
        ({"kv": KvSpec((KvLayer(2, 32),) * 2, 8, "float16")}, "key_cache.0 is float32"),
    ],
)
def test_what_cannot_be_opened_says_why(tiny_model, cpu_plugin, change, message):
    model = tiny_model()
    arguments = {"kv": model.kv, "num_blocks": 4, "plugins": [cpu_plugin], **change}
    with pytest.raises(KilnError, match=message):
        OnnxRuntimeDecoder(model.path, **arguments)


def test_memory_that_the_system_refuses_is_named(tiny_model, cpu_plugin, monkeypatch):
    def refuse(*_):
        raise MemoryError

    model = tiny_model()
    monkeypatch.setattr("engines.backends.onnxruntime._zeroed", refuse)
    with pytest.raises(KilnError, match=r"refuses .* 4 cache blocks, at key_cache.0: asked for .* free, .*; lower"):
        OnnxRuntimeDecoder(model.path, model.kv, 4, plugins=[cpu_plugin])


def test_damaged_and_missing_files(tiny_model, cpu_plugin, tmp_path):
    model = tiny_model()
    with pytest.raises(KilnError, match=r"none\.onnx does not exist"):
        OnnxRuntimeModel(tmp_path / "none.onnx")
    truncated = tmp_path / "truncated.onnx"
    truncated.write_bytes(model.path.read_bytes()[:1000])
    with pytest.raises(KilnError, match=r"cannot load .*truncated\.onnx"):
        OnnxRuntimeModel(truncated)
    not_a_library = tmp_path / "plugin.so"
    not_a_library.write_text("hello")
    with pytest.raises(KilnError, match=r"cannot load the operator library .*plugin\.so"):
        OnnxRuntimeDecoder(model.path, model.kv, 4, plugins=[not_a_library])
    with pytest.raises(KilnError, match=r"has no NoSuchProvider, only .*CPUExecutionProvider"):
        OnnxRuntimeModel(model.path, provider="NoSuchProvider", plugins=[cpu_plugin])


@pytest.fixture
def plain(tmp_path):
    """y = x w over any number of rows, and the row count of ids beside it."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("Shape", ["ids"], ["how many"]),
    ]
    graph = helper.make_graph(
        nodes,
        "plain",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 4]),
            helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"]),
        ],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 2]),
            helper.make_tensor_value_info("how many", TensorProto.INT64, [1]),
        ],
        [helper.make_tensor("w", TensorProto.FLOAT, [4, 2], np.arange(8, dtype=np.float32))],
    )
    path = tmp_path / "plain.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    model = OnnxRuntimeModel(path)
    yield model
    model.close()


X, IDS = np.ones((3, 4), np.float32), np.arange(5)


def test_infer_gives_outputs_under_the_graphs_names(plain):
    outputs = plain.infer({"ids": IDS, "x": X})
    assert list(outputs) == ["y", "how many"]
    assert (outputs["y"] == X @ np.arange(8, dtype=np.float32).reshape(4, 2)).all()
    assert outputs["how many"].tolist() == [5]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": X}, "found inputs x; the model expects x, ids: add ids"),
        ({}, "found inputs none; .*: add ids, x"),
        ({"x": X, "ids": IDS, "mask": X}, "leave out mask"),
        ({"x": X.astype(np.float64), "ids": IDS}, "x has dtype float64; expected float32: convert"),
        ({"x": X[0], "ids": IDS}, r"x has shape \[4\]; expected \[rows, 4\]"),
        ({"x": X[:, :3], "ids": IDS}, r"x has shape \[3, 3\]; expected \[rows, 4\]"),
        ({"x": X.tolist(), "ids": IDS}, "x is a list; expected a NumPy array of float32"),
    ],
)
def test_wrong_inputs_are_named(plain, inputs, message):
    with pytest.raises(KilnError, match=message):
        plain.infer(inputs)


def test_a_closed_model_refuses(plain):
    plain.close()
    with pytest.raises(RuntimeError, match="closed"):
        plain.infer({"x": X, "ids": IDS})
