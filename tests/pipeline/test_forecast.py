"""Forecasts: work counted before and after export is the same, rooflines follow from the table, batches fit exactly."""

import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from engines.sku import Sku, sku_table
from passes.onnx_model import decoder_from_structure, load_structure
from pipeline.build import build
from pipeline.config import BuildConfig
from pipeline.floors import AttentionLayer, DecoderWork, decoder_work_from_graph, plain_work
from pipeline.forecast import (
    Forecast,
    decoder_work_from_description,
    forecast_from_description,
    forecast_from_onnx,
    forecast_plain,
    precision_from_graph,
    refuse_what_cannot_fit,
)
from pipeline.load import Description, describe
from pipeline.roofline import decoder_roofline, plain_roofline
from pipeline.sku_forecast import SizeOptions, forecast_for_skus
from pipeline.source import resolve_source
from plugins.errors import KilnError

GPUS = [sku for sku in sku_table().values() if not sku.is_cpu]
CARD = Sku(
    name="card",
    arch="sm_89",
    backend="onnxruntime",
    provider="CUDAExecutionProvider",
    precisions=("fp32", "fp16"),
    plugin_architectures=("sm_89",),
    memory=10_000_000,
    bandwidth=1e6,
    peak={"fp32": 1e9},
    source="made up for this test",
)
WORK = DecoderWork(
    body_parameters=1000,
    head_parameters=500,
    weight_bytes=6000,
    layers=(AttentionLayer(2, 8, None),),
    kv_bytes_per_token=64,
)


def test_what_is_counted_before_export_is_what_the_graph_does(tiny_llama_folder, tiny_llama_bundle):
    description = describe(resolve_source(str(tiny_llama_folder)))
    assert description is not None
    before = decoder_work_from_description(description, SizeOptions())
    path = tiny_llama_bundle.engine_path
    after = decoder_work_from_graph(path, decoder_from_structure(path, load_structure(path)))
    assert before.layers == after.layers
    assert (before.head_parameters, before.kv_bytes_per_token) == (after.head_parameters, after.kv_bytes_per_token)
    assert before.body_parameters == pytest.approx(after.body_parameters, rel=0.01)  # norms
    assert before.weight_bytes == pytest.approx(after.weight_bytes, rel=0.01)
    for tokens in (1, 100):
        assert before.prefill_operations(tokens) == pytest.approx(after.prefill_operations(tokens), rel=0.01)


@dataclass
class Text:
    """What of a configuration counts; Gemma's, with windows in all layers but each second."""

    vocab_size: int = 100
    hidden_size: int = 16
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    max_position_embeddings: int = 4096
    sliding_window: int = 32
    layer_types: tuple[str, ...] = ("sliding_attention", "full_attention") * 2
    tie_word_embeddings: bool = False

    def get_text_config(self) -> "Text":
        return self


def description_of(text: Text) -> Description:
    return Description("GemmaForCausalLM", True, text, SimpleNamespace, parameters=10_000)


def test_windows_heads_and_tables_of_a_configuration():
    work = decoder_work_from_description(description_of(Text()), SizeOptions("fp16", "int8"))
    assert [layer.window for layer in work.layers] == [32, None, 32, None]
    assert {(layer.heads, layer.head_dim) for layer in work.layers} == {(4, 8)}
    assert (work.body_parameters, work.head_parameters) == (10_000 - 2 * 1600, 1600)
    assert work.weight_bytes == 2 * (10_000 - 1600)
    assert work.kv_bytes_per_token == 2 * 4 * 2 * 8
    tied = decoder_work_from_description(description_of(Text(tie_word_embeddings=True)), SizeOptions())
    assert (tied.body_parameters, tied.weight_bytes) == (10_000 - 1600, 40_000)


def test_a_roofline_by_hand():
    roofline = decoder_roofline(WORK, CARD, "fp32", [100, 1000], {100: 50, 1000: 5})
    prefill = roofline.of("prefill")[0]
    operations = 2 * 1000 * 100 + 2 * 500 + 4 * 2 * 8 * (100 * 101 / 2)
    assert prefill.rate == pytest.approx(100 / max(operations / 1e9, 6000 / 1e6))
    assert prefill.bound_by == "reading"
    one, most = (point for point in roofline.of("decode") if point.length == 100)
    assert (one.batch, most.batch) == (1, 50)
    assert one.rate == pytest.approx(1 / ((6000 + 64 * 100) / 1e6))
    assert most.rate == pytest.approx(50 / ((6000 + 50 * 64 * 100) / 1e6))
    faster = decoder_roofline(WORK, CARD.model_copy(update={"bandwidth": 1e12}), "fp32", [100], {100: 1})
    assert faster.of("prefill")[0].bound_by == "products"
    assert faster.of("prefill")[0].rate == pytest.approx(100 / (operations / 1e9))
    assert "prefill of 100 tokens" in faster.sentence()


@given(st.integers(1, 10**12), st.integers(1, 10**12), st.integers(0, 10**6), st.integers(1, 4096), st.integers(1, 512))
def test_no_rate_exceeds_a_limit(body, read, cache, length, batch):
    work = replace(WORK, body_parameters=body, weight_bytes=read, kv_bytes_per_token=cache)
    for sku in GPUS:
        roofline = decoder_roofline(work, sku, "fp32", [length], {length: batch})
        for point in roofline.points:
            units = length if point.way == "prefill" else point.batch
            assert point.rate * work.weight_bytes / units <= sku.bandwidth * (1 + 1e-9)
            assert point.rate * 2 * body <= sku.peak["fp32"] * (1 + 1e-9)
        decodes = [point.rate for point in roofline.of("decode")]
        assert decodes[-1] >= decodes[0] * (1 - 1e-9), "a larger batch is never slower in all"


def test_what_the_table_does_not_know_is_not_guessed():
    assert decoder_roofline(WORK, CARD, "fp16", [10], {10: 1}) is None
    assert decoder_roofline(WORK, CARD.model_copy(update={"bandwidth": None}), "fp32", [10], {10: 1}) is None
    cpu = sku_table()["cpu-avx2"]
    forecast = forecast_from_description(description_of(Text()), cpu, SizeOptions())
    assert forecast.roofline is None
    assert forecast.sequences


def test_no_batch_no_rate():
    roofline = decoder_roofline(WORK, CARD, "fp32", [100], {100: 0})
    assert roofline.of("decode") == []


def test_the_largest_batch_is_exact():
    text = Text()
    options = SizeOptions()
    cache = 2 * 4 * 2 * 8 * 4 * 512
    card = CARD.model_copy(update={"memory": int((40_000 + 3 * cache) / 0.9) + 2})
    assert forecast_from_description(description_of(text), card, options).sequences == {512: 3, 2048: 0, 4096: 0}
    less = card.model_copy(update={"memory": int((40_000 + 3 * cache) / 0.9) - 2})
    assert forecast_from_description(description_of(text), less, options).sequences[512] == 2


def test_a_precision_that_the_hardware_lacks():
    t4 = sku_table()["t4"]
    forecast = forecast_plain(1000, t4, SizeOptions("bf16"))
    assert forecast.problem == "t4 does not multiply bf16; choose another precision or SKU"
    with pytest.raises(KilnError, match="t4 does not multiply bf16"):
        refuse_what_cannot_fit(forecast)
    assert forecast_plain(1000, t4, SizeOptions("fp16")).weights == 2000


@pytest.mark.parametrize("sku", GPUS, ids=lambda sku: sku.name)
def test_every_gpu_is_forecast(tiny_llama_folder, sku):
    description = describe(resolve_source(str(tiny_llama_folder)))
    forecast = forecast_from_description(description, sku, SizeOptions())
    assert forecast.problem is None
    document = json.loads(json.dumps(forecast.to_dict()))
    assert document["fits"] is True
    assert document["plugin_free"] == (sku.name == "t4")
    assert {point["way"] for point in document["roofline"]["points"]} == {"prefill", "decode"}
    assert forecast.roofline.bandwidth == sku.bandwidth
    assert any("at most (" in line for line in forecast.lines())


@pytest.fixture
def net(tmp_path):
    """x [batch, 3, 8, 8] -> Conv to 4 channels -> Relu -> Conv to 2 -> plus the first Conv's mean."""
    generator = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(generator.standard_normal((4, 3, 3, 3)).astype(np.float32), "w"),
        numpy_helper.from_array(generator.standard_normal((2, 4, 1, 1)).astype(np.float32), "v"),
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("Conv", ["b", "v"], ["c"], name="second"),
        helper.make_node("ReduceMean", ["a"], ["m"], name="mean", keepdims=1),
        helper.make_node("Add", ["c", "m"], ["y"], name="add"),
    ]
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 8, 8]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2, 8, 8]),
    ]
    graph = helper.make_graph(nodes, "net", values[:1], values[1:], weights)
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.mark.parametrize("batch", [1, 3])
def test_a_plain_models_work_by_hand(net, batch):
    work = plain_work(net, {"x": np.zeros((batch, 3, 8, 8), np.float32)}, batch)
    assert work.operations == 2 * 64 * (4 * 27 + 2 * 4)
    assert work.weight_bytes == 4 * (4 * 27 + 2 * 4)
    assert work.activation_bytes == pytest.approx(4 * 64 * (4 + 4 + 2), rel=0.02)  # a, b and c, a being kept for m


def test_nodes_without_names_leave_activations_unknown(net):
    model = onnx.load(net)
    model.graph.node[1].name = ""
    onnx.save(model, net)
    work = plain_work(net, {"x": np.zeros((1, 3, 8, 8), np.float32)}, 1)
    assert work.activation_bytes is None
    assert work.operations > 0
    forecast = forecast_from_onnx(net, CARD, work)
    assert forecast.most_samples is None
    assert [point.batch for point in forecast.roofline.points] == [1]


def test_a_plain_models_largest_batch_and_rate(net, silent):
    work = plain_work(net, {"x": np.zeros((1, 3, 8, 8), np.float32)}, 1)
    forecast = forecast_from_onnx(net, CARD, work)
    assert forecast.most_samples == int((9_000_000 - net.stat().st_size) / work.activation_bytes)
    one, most = forecast.roofline.points
    assert one.rate == pytest.approx(1 / max(work.operations / 1e9, work.weight_bytes / 1e6))
    assert most.rate == pytest.approx(1e9 / work.operations)
    assert forecast_for_skus(str(net), [CARD], SizeOptions(), silent) == [forecast]
    assert plain_roofline(work, CARD, "fp16", [1]) is None
    tiny = CARD.model_copy(update={"memory": int((net.stat().st_size + work.activation_bytes / 2) / 0.9)})
    assert "not even one sample fits" in forecast_from_onnx(net, tiny, work).problem


def test_a_graph_takes_no_options(net, silent):
    with pytest.raises(KilnError, match="its own precision, cache and context; leave --precision"):
        forecast_for_skus(str(net), [CARD], SizeOptions("fp16"), silent)


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float32", "fp32"), ("float16", "fp16"), ("int8", "int8"), ("uint8", "int8")]
)
def test_the_precision_of_a_graph_is_its_weights(dtype, expected):
    weights = [
        numpy_helper.from_array(np.zeros((64, 64), dtype), "w"),
        numpy_helper.from_array(np.zeros(64, np.float32), "scale"),
    ]
    graph = helper.make_graph([], "g", [], [], weights)
    assert precision_from_graph(helper.make_model(graph)) == expected


def test_a_bundle_is_forecast_as_the_model_was(tiny_llama_folder, tiny_llama_bundle, silent):
    before = forecast_for_skus(str(tiny_llama_folder), GPUS, SizeOptions(), silent)
    after = forecast_for_skus(str(tiny_llama_bundle.path), GPUS, SizeOptions(), silent)
    for first, second in zip(before, after, strict=True):
        assert first.sequences == pytest.approx(second.sequences, rel=0.01)
        assert [point.rate for point in first.roofline.points] == pytest.approx(
            [point.rate for point in second.roofline.points], rel=0.02
        )


def test_a_decoder_for_a_t4_is_told_of_the_plugin_free_form(tiny_llama_folder, silent, tmp_path):
    with pytest.raises(
        KilnError, match=r"t4 is sm_75.* needs sm_80 or newer; .*only in the plugin-free form"
    ) as caught:
        build(str(tiny_llama_folder), ["t4"], BuildConfig(out=tmp_path / "out"), silent)
    assert str(caught.value).endswith("kiln tensorrt build MODEL --sku t4 --out BUNDLE --attention native")
    assert list(tmp_path.iterdir()) == []


def test_a_plain_model_for_a_t4_needs_no_plugin(net, silent, tmp_path):
    with pytest.raises(KilnError, match="t4 is built with TensorRT") as caught:
        build(str(net), ["t4"], BuildConfig(out=tmp_path / "out"), silent)
    assert "kiln tensorrt build MODEL --sku t4" in str(caught.value)
    assert "plugin" not in str(caught.value)


def test_a_decoder_for_a_jetson_is_told_of_kiln_tensorrt(tiny_llama_folder, silent, tmp_path):
    with pytest.raises(KilnError, match=r"built with TensorRT.*: kiln tensorrt build MODEL --sku jetson-orin"):
        build(str(tiny_llama_folder), ["jetson-orin"], BuildConfig(out=tmp_path / "out"), silent)


def test_a_sku_of_the_users_own_reaches_the_build(tiny_llama_folder, silent, tmp_path):
    file = tmp_path / "own.toml"
    file.write_text('[tiny]\nlike = "l4"\nmemory = 400_000\nsource = "made up for this test"\n')
    with pytest.raises(
        KilnError, match=r"of weights no sequence of 256 tokens fits tiny|the weights take .* but tiny has"
    ):
        build(str(tiny_llama_folder), ["tiny"], BuildConfig(precision="fp32", sku_file=file), silent)


def test_lines_say_what_fits():
    forecast = Forecast("card", 1000, 100, None, None, {}, most_samples=3)
    assert forecast.lines() == ["forecast for card: weights 100 B of 1000 B memory", "samples that fit in one call: 3"]
