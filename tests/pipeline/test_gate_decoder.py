"""The gate on a tiny Llama: equal graphs pass, noise in a layer is found, long contexts are judged by themselves."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from rich.console import Console

from passes.graph import graph_from_path, proto_from_graph
from passes.onnx_model import onnx_model_from_path
from passes.quantization.layers import layers_of
from passes.quantize_cache import QuantizeCache
from passes.weights import inline
from pipeline.compare.material import default_text
from pipeline.gate import GateConfig, GateFailedError, GateLimits, require_passed, run_gate
from pipeline.gate.generation import GenerationConfig
from pipeline.gate.html import html_from_report, write_html
from pipeline.gate.material import Cut, DecoderData, TextStratum, decoder_data_from_tokens
from pipeline.gate.report import tables_from_report
from pipeline.progress import Progress
from plugins.errors import KilnError

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

LAYER = "model.layers.1.mlp.gate_proj"
QUICK = GateConfig(
    schemes=("w8a16",),
    generation=GenerationConfig(greedy=12, continuation=24, continued=2),
    threads=1,
    max_trials=6,
)
LIMITS = GateLimits()
Weights = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def data(llama_bundle: Path) -> DecoderData:
    from engines.runtime.tokenizer import Tokenizer

    tokens = Tokenizer(llama_bundle / "tokenizer").encode(default_text())
    cuts = (Cut("short", 64, 256, 16), Cut("long", 480, 480, 400))
    return decoder_data_from_tokens([tokens], cuts, "Kiln's own text", prompts=2)


@pytest.fixture(scope="module")
def changed(llama_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The bundle's graph with its weights, by layer or by name, changed in place."""
    names = {layer.name: layer.weight for layer in layers_of(graph_from_path(llama_bundle / "engine.onnx"))}

    def make(change: Callable[[Weights], None]) -> Path:
        model = onnx.load(llama_bundle / "engine.onnx")
        arrays = {tensor.name: onnx.numpy_helper.to_array(tensor).copy() for tensor in model.graph.initializer}
        change({**arrays, **{layer: arrays[weight] for layer, weight in names.items()}})
        for tensor in model.graph.initializer:
            tensor.CopyFrom(onnx.numpy_helper.from_array(arrays[tensor.name], tensor.name))
        path = tmp_path_factory.mktemp("changed") / "engine.onnx"
        onnx.save(model, path)
        return path

    return make


def noisy(amount: float, *layers: str) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        generator = np.random.default_rng(0)
        for layer in layers:
            weight = weights[layer]
            weight += (amount * weight.std() * generator.normal(size=weight.shape)).astype(np.float32)

    return change


def test_equal_graphs_pass_and_the_limits_say_where_they_come_from(
    llama_bundle: Path, data: DecoderData, silent: Progress
) -> None:
    report = require_passed(run_gate(llama_bundle, llama_bundle, data, LIMITS, QUICK, silent))
    values = {(check.stratum, check.check.name): check.check for check in report.checks}
    for stratum in ("short", "long"):
        assert values[stratum, "kl_max"].value == 0.0
        assert values[stratum, "layer_snr_db"].value == np.inf
        assert values[stratum, "greedy_agreement"].value == 1.0
        assert values[stratum, "repetition"].value == values[stratum, "drift"].value == 0.0
        assert "convention for w8a16" in values[stratum, "perplexity"].origin
        assert "KV cache rounded to BF16 has" in values[stratum, "kl_p99"].origin
    assert all(check.judged for check in report.checks)
    assert {check.dimension for check in report.checks} == {"numeric", "distribution", "generation"}
    noise = report.strata[1].noise
    assert 0 < noise["kl_mean"] < 0.01
    assert 20 < noise["layer_snr_db"] < 100
    assert 0 <= report.strata[0].reordered["kl_mean"] < noise["kl_mean"]
    assert "64 tokens" in report.settings["texts"]
    document = json.loads(report.to_json())
    assert document["passed"] is True
    assert document["checks"][0]["check"]["value"] == 0.0


def test_noise_in_one_layer_fails_and_that_layer_is_named(
    llama_bundle: Path, data: DecoderData, changed, silent: Progress, tmp_path: Path
) -> None:
    report = run_gate(llama_bundle, changed(noisy(0.3, LAYER)), data, LIMITS, QUICK, silent)
    assert not report.passed
    assert {check.stratum for check in report.failures} == {"short", "long"}
    assert report.advice is not None
    assert report.advice.ranking[0] == report.advice.keep[0] == LAYER
    assert not report.advice.verified
    before = [row for row in report.strata[0].layers if "layers.0" in row.name]
    assert len(before) == 5
    assert all(row.snr_db == np.inf for row in before)
    after = {row.name: row for row in report.strata[0].layers}
    assert after["lm_head"].snr_db < 30  # what it was given is wrong, what it does is not
    assert [name for name, row in after.items() if row.added] == [LAYER]
    assert report.advice.ranking == (LAYER,)
    with pytest.raises(GateFailedError, match=rf"not tried: --keep {LAYER}") as caught:
        require_passed(report)
    assert caught.value.report is report
    console = Console(record=True, width=200, file=(tmp_path / "out").open("w"))
    console.print(tables_from_report(report))
    text = console.export_text()
    assert "FAIL" in text
    assert LAYER in text
    page = html_from_report(report)
    assert page.count("<svg") == page.count("</svg>") >= 4
    assert LAYER in page
    write_html(report, tmp_path / "gate.html")
    assert (tmp_path / "gate.html").read_text() == page


def test_what_to_keep_is_tried_and_is_as_small_as_it_can_be(
    llama_bundle: Path, data: DecoderData, changed, silent: Progress
) -> None:
    wrong = {LAYER, "model.layers.0.self_attn.o_proj"}
    slightly = "model.layers.0.mlp.down_proj"
    kept: list[set[str]] = []

    def rebuild(keep) -> Path:
        kept.append(set(keep))

        def change(weights: Weights) -> None:
            noisy(0.3, *sorted(wrong - set(keep)))(weights)
            noisy(1e-4, *{slightly} - set(keep))(weights)

        return changed(change)

    report = run_gate(llama_bundle, rebuild(()), data, LIMITS, QUICK, silent, rebuild)
    assert report.advice is not None
    assert report.advice.verified
    assert set(report.advice.keep) == wrong
    assert len(kept) - 1 == len(report.advice.trials) <= QUICK.max_trials
    assert "--keep" in str(GateFailedError(report))
    assert "passes with 2 layers" in str(GateFailedError(report))


def test_a_model_that_is_wrong_beyond_a_position_fails_on_long_texts_only(
    llama_bundle: Path, data: DecoderData, changed, silent: Progress
) -> None:
    def beyond(weights: Weights) -> None:
        for name in ("cos/table/cos_cache", "sin/table/sin_cache"):
            weights[name][300:] = weights[name][300:][::-1].copy()

    report = run_gate(llama_bundle, changed(beyond), data, LIMITS, QUICK, silent)
    assert {check.stratum for check in report.failures} == {"long"}
    short = {check.check.name: check.check.value for check in report.checks if check.stratum == "short"}
    assert short["kl_max"] == 0.0
    long = next(stratum for stratum in report.strata if stratum.name == "long")
    assert all(part.kl_mean == 0 for part in long.curve if part.end <= 300)
    assert min(part.kl_mean for part in long.curve if part.start >= 310) > 1e-3


def test_nan_is_named_by_layer_and_position(llama_bundle: Path, data: DecoderData, changed, silent: Progress) -> None:
    def poison(weights: Weights) -> None:
        weights[LAYER][3, 5] = np.nan

    with pytest.raises(KilnError, match=rf"layer {LAYER} of the candidate gives NaN or infinity, first in row 0"):
        run_gate(llama_bundle, changed(poison), data, LIMITS, QUICK, silent)

    def later(weights: Weights) -> None:
        weights["cos/table/cos_cache"][350:] = np.nan

    with pytest.raises(KilnError, match=r"row 94 after token 256"):
        run_gate(llama_bundle, changed(later), data, LIMITS, QUICK, silent)
    without = replace(QUICK, layers=False)
    with pytest.raises(KilnError, match="gives NaN as logits after token 350 of a text of 480"):
        run_gate(llama_bundle, changed(later), data, LIMITS, without, silent)


def test_an_int8_cache_is_judged_as_any_candidate(
    llama_bundle: Path, data: DecoderData, silent: Progress, tmp_path: Path
) -> None:
    decoder = onnx_model_from_path(llama_bundle / "engine.onnx").decoder
    graph = graph_from_path(llama_bundle / "engine.onnx")
    metadata = QuantizeCache(decoder).call(graph).metadata
    inline(graph)
    path = tmp_path / "engine.onnx"
    path.write_bytes(proto_from_graph(graph, metadata).SerializeToString())
    config = replace(QUICK, schemes=("int8-kv",))
    report = run_gate(llama_bundle, path, data, LIMITS, config, silent)
    values = {(check.stratum, check.check.name): check.check for check in report.checks}
    assert "convention for int8-kv" in values["long", "perplexity"].origin
    assert 0 < values["long", "kl_mean"].value < 0.1
    assert 10 < values["long", "layer_snr_db"].value < 60
    assert not report.unmatched_layers
    assert all(row.added == 0 for row in report.strata[1].layers)  # no layer itself was touched


def test_a_torch_model_is_a_reference_too(
    llama_folder: Path, llama_bundle: Path, data: DecoderData, silent: Progress
) -> None:
    report = run_gate(str(llama_folder), llama_bundle, data, LIMITS, QUICK, silent)
    assert report.passed, report.sentence()
    assert "layer_snr_db" not in {check.check.name for check in report.checks}
    assert "steps half as long" in report.noise_origin


def test_what_cannot_be_judged_is_refused(
    llama_folder: Path, llama_bundle: Path, make_llama, data: DecoderData, silent: Progress
) -> None:
    with pytest.raises(KilnError, match="a vocabulary of 500 tokens, the reference of 512"):
        run_gate(llama_bundle, str(make_llama(vocabulary=500)), data, LIMITS, QUICK, silent)
    with pytest.raises(KilnError, match="no limits for the scheme 'w3a3'"):
        run_gate(llama_bundle, llama_bundle, data, LIMITS, GateConfig(schemes=("w3a3",)), silent)
    with pytest.raises(KilnError, match="limits for the stratum 'medium'; the data has short, long"):
        run_gate(llama_bundle, llama_bundle, data, GateLimits(strata={"medium": {"kl_mean": 1}}), QUICK, silent)
    foreign = DecoderData((TextStratum("short", ((1, 600),)),), "other tokens")
    with pytest.raises(KilnError, match="has the token 600; the model knows 0 to 511"):
        run_gate(llama_bundle, llama_bundle, foreign, LIMITS, QUICK, silent)
    long = GateConfig(generation=GenerationConfig(continuation=500))
    with pytest.raises(KilnError, match="500 are to be generated after it; the context holds 512"):
        run_gate(llama_bundle, llama_bundle, data, LIMITS, long, silent)
