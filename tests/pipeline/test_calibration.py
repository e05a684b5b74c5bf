"""Models are run as they are served and their tensors counted as they are; drift is found; `kiln calibrate`."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from growing_decoder import growing_decoder
from onnx import parser

from passes.onnx_model import onnx_model_from_path
from passes.quantization.table import table_from_json
from pipeline.calibration import CalibrationConfig, calibrate
from pipeline.calibration.data import DataConfig, calibration_set
from pipeline.calibration.drift import drift_of, html_from_drift, json_from_drift, table_from_drift
from pipeline.calibration.histogram import Histogram
from pipeline.calibration.moments import moments_of
from pipeline.calibration.observe import ObserveConfig, observables_of, observe
from pipeline.calibration.ranges import RangeConfig, ranges_of
from pipeline.calibration.samples import Draw, Sample, drawn_set
from pipeline.calibration.strata import UNSIZED
from pipeline.calibration.subject import CalibrationModel, calibration_model_from_path
from pipeline.calibration.tables import table_from_observed
from pipeline.cli_calibrate import calibrate_command
from pipeline.packed import packed_logits
from plugins.errors import KilnError
from plugins.paged_attention.schema import EXPORT_DOMAIN, OP_TYPE

CONTEXT = 256
ONE = ObserveConfig(threads=1)
ALL_OF_IT = Draw(100, 0, 0)
CNN = """<ir_version: 8, opset_import: ["" : 17]>
net (float[N, 3, 8, 8] image) => (float[N, 2] y)
{
    shifted = Log (image)
    [first] a = Conv (shifted, w1)
    b = Relu (a)
    [second] c = Conv (b, w2)
    d = Flatten (c)
    [last] y = MatMul (d, w3)
}"""


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    path = tmp_path_factory.mktemp("growing") / "growing.onnx"
    growing_decoder(path, CONTEXT, growth=16.0, flat=32)
    return calibration_model_from_path(path)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Token ids of every stratum: four samples or more, and 300 tokens."""
    generator = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    lengths = [n for n in (20, 50, 100, 200) for _ in range(max(4, 300 // n))]
    lines = [json.dumps({"token_ids": generator.integers(0, 61, n).tolist()}) for n in lengths]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture(scope="module")
def data(decoder, texts):
    return calibration_set([texts], decoder)


@pytest.fixture(scope="module")
def observed(decoder, data, silent):
    return observe(decoder, data, ONE, silent)


@pytest.fixture
def cnn(tmp_path):
    proto = parser.parse_model(CNN)
    generator = np.random.default_rng(1)
    for name, sizes in (("w1", (4, 3, 1, 1)), ("w2", (4, 4, 3, 3)), ("w3", (144, 2))):
        values = generator.normal(size=sizes).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    onnx.save(proto, tmp_path / "cnn.onnx")
    return CalibrationModel(onnx_model_from_path(tmp_path / "cnn.onnx"))


def images(count=6, seed=2):
    values = np.random.default_rng(seed).uniform(0.1, 5, (count, 3, 8, 8)).astype(np.float32)
    return [Sample(f"image {i}", 1, lambda i=i: {"image": values[i : i + 1]}) for i in range(count)]


def embedding(model):
    proto = onnx.load(model.model.path)
    return {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}["embedding"]


def counted(values, bins=4096):
    found = Histogram(bins=bins)
    found.add(np.ascontiguousarray(values))
    return found


def test_what_enters_layers_is_counted_exactly(decoder, data, observed):
    assert list(observed.tensors) == ["tokens", "attention", "grown", "active", "rows_of_head"]
    tokens = observed.tensors["tokens"]
    assert tokens.observable.layers == tuple(f"layers.0.attention.{x}_proj" for x in "qkv")
    assert observed.samples == {"short": 15, "medium": 6, "long": 4, "near-limit": 4}
    table = embedding(decoder)
    for stratum, found in tokens.strata.items():
        rows = np.concatenate([table[s.read()["input_ids"]] for s in data.samples if data.stratum_of(s) == stratum])
        assert (found.histogram.counts == counted(rows).counts).all()
        assert (found.low == rows.min(axis=0)).all()
        assert (found.high == rows.max(axis=0)).all()
        assert found.rows == len(rows)
    everything = np.concatenate([table[s.read()["input_ids"]] for s in data.samples])
    assert (tokens.histogram.counts == counted(everything).counts).all()
    assert (tokens.magnitudes == np.abs(everything).max(axis=0)).all()
    assert observed.tensors["rows_of_head"].histogram.totals[0] == len(everything) * 128  # every token's


def test_chunks_see_the_cache_and_several_runs_see_the_same(decoder, data, observed, silent):
    chunked = observe(decoder, data, replace(ONE, chunk=16), silent)
    bounded = observe(decoder, data, replace(ONE, budget=200_000), silent)
    assert (observed.runs, chunked.runs, bounded.runs) == (1, 1, 2)
    assert (chunked.chunk, bounded.chunk) == (16, 128)
    for other in (chunked, bounded):
        for name, seen in observed.tensors.items():
            for stratum, statistics in seen.strata.items():
                found = other.tensors[name].strata[stratum]
                assert found.histogram.totals[0] == statistics.histogram.totals[0]
                assert found.high == pytest.approx(statistics.high, rel=1e-4, abs=1e-4)
                assert found.low == pytest.approx(statistics.low, rel=1e-4, abs=1e-4)


def test_the_operator_as_exported_is_bound(decoder, data, observed, silent, tmp_path):
    proto = onnx.load(decoder.model.path)
    for node in proto.graph.node:
        node.domain = EXPORT_DOMAIN if node.op_type == OP_TYPE else node.domain
    proto.opset_import.append(onnx.helper.make_opsetid(EXPORT_DOMAIN, 1))
    onnx.save(proto, tmp_path / "exported.onnx", save_as_external_data=True, location="exported.data", size_threshold=0)
    found = observe(calibration_model_from_path(tmp_path / "exported.onnx"), data, ONE, silent)
    for name, seen in observed.tensors.items():
        assert (found.tensors[name].histogram.counts == seen.histogram.counts).all()
    assert found.model_sha256 != observed.model_sha256


def quantised_logits(model, ranges, ids):
    """Logits of every token with the two feed-forward activations in INT8 of the given magnitudes."""
    proto = onnx.load(model.model.path)
    for name, magnitude in ranges.items():
        scale, zero = onnx.numpy_helper.from_array(np.float32(magnitude / 127), f"{name}/scale"), f"{name}/zero"
        proto.graph.initializer.extend([scale, onnx.numpy_helper.from_array(np.int8(0), zero)])
        reader = next(node for node in proto.graph.node if node.op_type == "MatMul" and node.input[0] == name)
        reader.input[0] = f"{name}/dequantised"
        for op, source, target in (("QuantizeLinear", name, "q"), ("DequantizeLinear", f"{name}/q", "dequantised")):
            node = onnx.helper.make_node(op, [source, scale.name, zero], [f"{name}/{target}"])
            proto.graph.node.insert(list(proto.graph.node).index(reader), node)
    path = model.model.path.with_name("quantised.onnx")
    onnx.save(proto, path)
    step = list(range(len(ids)))
    (logits,) = packed_logits(path, model.decoder, model.plugins, [ids], [[len(step)]], optimized=False)
    return logits


def test_the_trap_short_data_passes_short_and_fails_long(decoder, observed):
    """Why the coverage gate refuses: with ranges of short texts, INT8 agrees on short texts only."""
    strata = {name: table_from_observed(observed, RangeConfig()).of(name).strata for name in ("grown", "active")}
    ids = np.random.default_rng(9).integers(0, 61, 250).astype(np.int32)
    exact = quantised_logits(decoder, {}, ids)
    agreement = {}
    for stratum in ("short", "near-limit"):
        found = quantised_logits(decoder, {name: ranges[stratum].magnitude for name, ranges in strata.items()}, ids)
        same = exact.argmax(axis=1) == found.argmax(axis=1)
        agreement[stratum] = (same[:32].mean(), same[128:].mean())
    assert agreement["short"][0] > 0.95
    assert agreement["short"][1] < 0.9
    assert agreement["near-limit"][1] > 0.95


def test_peak_memory_is_told(observed):
    assert observed.peak_memory is None or observed.peak_memory > 2**20


def test_outputs_and_everything(decoder, data, silent):
    outputs = [item.name for item in observables_of(decoder, replace(ONE, outputs=True))]
    assert {"tokens", "q", "up", "down", "logits"} <= set(outputs)
    assert "shrunk" not in outputs
    everything = observe(decoder, data, replace(ONE, everything=True), silent)
    assert {"shrunk", "factor", "residual"} <= set(everything.tensors)
    assert not [name for name in everything.tensors if "cache" in name]
    assert everything.tensors["factor"].histogram.high[0] == pytest.approx(
        1 + 15 * (200 - 1 - 32) / (CONTEXT - 1 - 32), rel=1e-5
    )


def test_channels_of_images_are_dimension_1(cnn, silent):
    pool = images()
    found = observe(
        cnn, drawn_set("images", pool, UNSIZED, ALL_OF_IT), replace(ONE, means=True, per_channel=True), silent
    )
    assert list(found.tensors) == ["shifted", "b", "d"]
    values = np.log(np.concatenate([sample.read()["image"] for sample in pool]))
    seen = found.tensors["shifted"]
    assert seen.magnitudes == pytest.approx(np.abs(values).max(axis=(0, 2, 3)), rel=1e-5)
    assert seen.mean_magnitudes == pytest.approx(np.abs(values).mean(axis=(0, 2, 3)), rel=1e-5)
    assert seen.channels is not None
    assert seen.channels.totals.tolist() == [6 * 64] * 3
    _, high = ranges_of(seen.channels, RangeConfig(symmetric=False))
    assert high == pytest.approx(np.maximum(values.max(axis=(0, 2, 3)), 0), rel=1e-5)
    assert found.tensors["d"].magnitudes.shape == (144,)
    table = table_from_observed(found, RangeConfig("mse"))
    assert table.of("b").channels is not None
    assert len(table.of("b").channels.low) == 4
    assert table.of("shifted").mean_magnitudes == pytest.approx(seen.mean_magnitudes)


def test_what_is_not_finite_is_named(cnn, silent):
    good = images()
    for value, kind in ((-1.0, "NaN"), (0.0, "infinite values")):
        bad = Sample("the bad one", 1, lambda value=value: {"image": np.full((1, 3, 8, 8), value, np.float32)})
        data = drawn_set("images", [*good, bad], UNSIZED, ALL_OF_IT)
        with pytest.raises(KilnError, match=f"tensor 'shifted'.*layer first.*{kind} on the bad one"):
            observe(cnn, data, ONE, silent)


def test_half_precision_and_unused_inputs(tmp_path, silent):
    text = """<ir_version: 8, opset_import: ["" : 17]>
    net (float[N, 4] x, float[N, 2] other) => (float[N, 2] y)
    { h = Cast <to = 10> (x)
      [product] p = MatMul (h, w)
      f = Cast <to = 1> (p)
      y = Add (f, other) }"""
    proto = parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 2), np.float16), "w"))
    onnx.save(proto, tmp_path / "half.onnx")
    model = CalibrationModel(onnx_model_from_path(tmp_path / "half.onnx"))
    feed = {"x": np.array([[1, -2, 3, 0.5]], np.float32), "other": np.zeros((1, 2), np.float32)}
    data = drawn_set("rows", [Sample("a", 1, lambda: feed)] * 2, UNSIZED, ALL_OF_IT)
    found = observe(model, data, ONE, silent)
    assert found.tensors["h"].histogram.low[0] == -2
    assert found.tensors["h"].magnitudes.tolist() == [1, 2, 3, 0.5]


def test_a_dimension_that_changes_has_no_channels(tmp_path, silent):
    text = """<ir_version: 8, opset_import: ["" : 17]>
    net (float[seq, 4] x) => (float[2, seq] y)
    { [product] p = MatMul (x, w)
      y = Transpose <perm = [1, 0]> (p) }"""
    proto = parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 2), np.float32), "w"))
    onnx.save(proto, tmp_path / "net.onnx")
    model = CalibrationModel(onnx_model_from_path(tmp_path / "net.onnx"))
    pool = [Sample(f"{n} rows", 1, lambda n=n: {"x": np.full((n, 4), n, np.float32)}) for n in (2, 3)]
    found = observe(model, drawn_set("rows", pool, UNSIZED, ALL_OF_IT), replace(ONE, everything=True), silent)
    assert found.tensors["p"].magnitudes.tolist() == [12, 12]
    assert found.tensors["y"].magnitudes.size == 0
    assert found.tensors["y"].histogram.high[0] == 12
    assert table_from_observed(found, RangeConfig()).of("y").channel_magnitudes == ()


def test_a_model_without_layers(tmp_path, silent):
    text = '<ir_version: 8, opset_import: ["" : 17]> net (float[N] x) => (float[N] y) { y = Relu (x) }'
    onnx.save(parser.parse_model(text), tmp_path / "relu.onnx")
    with pytest.raises(KilnError, match="nothing to calibrate"):
        observables_of(CalibrationModel(onnx_model_from_path(tmp_path / "relu.onnx")))


def test_second_moments(decoder, data, silent):
    table = embedding(decoder)
    rows = np.concatenate([table[sample.read()["input_ids"]] for sample in data.samples]).astype(np.float64)
    found = {moments.tensor: moments for moments in moments_of(decoder, data, ONE, progress=silent)}
    assert list(found) == ["tokens", "attention", "grown", "active", "rows_of_head"]
    assert found["tokens"].second == pytest.approx(rows.T @ rows, rel=1e-4, abs=1e-2)
    assert found["tokens"].mean_magnitude == pytest.approx(np.abs(rows).mean(axis=0), rel=1e-5)
    assert found["tokens"].rows == len(rows)
    some = list(moments_of(decoder, data, ONE, ["layers.0.mlp.down_proj", "head"], memory=1, progress=silent))
    assert [moments.layers for moments in some] == [("layers.0.mlp.down_proj",), ("head",)]
    assert some[0].second == pytest.approx(found["active"].second, rel=1e-6)
    with pytest.raises(KilnError, match=r"no layer 'layers\.9'"):
        next(moments_of(decoder, data, ONE, ["layers.9"]))


def test_moments_of_convolutions_and_of_what_is_not_finite(cnn, silent):
    data = drawn_set("images", images(), UNSIZED, ALL_OF_IT)
    assert [moments.layers for moments in moments_of(cnn, data, ONE, progress=silent)] == [("last",)]
    with pytest.raises(KilnError, match="'first' is a convolution"):
        next(moments_of(cnn, data, ONE, ["first"]))
    bad = Sample("the bad one", 1, lambda: {"image": np.full((1, 3, 8, 8), -1, np.float32)})
    with pytest.raises(KilnError, match=r"tensor 'd'.*layer last.*on the bad one"):
        next(moments_of(cnn, drawn_set("images", [*images(), bad], UNSIZED, ALL_OF_IT), ONE, progress=silent))


def test_drift_is_found_where_ranges_grow(observed):
    table = table_from_observed(observed, RangeConfig())
    report = drift_of(observed, table)
    assert (report.shortest, report.longest) == ("short", "near-limit")
    grown = {drift.tensor: drift for drift in report.tensors}
    assert {drift.tensor for drift in report.tensors[:2]} == {"grown", "active"}
    assert grown["grown"].ratio > 5
    assert grown["tokens"].ratio == pytest.approx(1, abs=0.2)
    assert grown["grown"].clipped > 0.05
    assert grown["tokens"].clipped < 1e-3
    assert grown["grown"].loss > 10
    assert grown["grown"].sqnr["short"]["short"] - 10 > grown["grown"].sqnr["short"]["near-limit"]  # coarser steps
    assert [drift.ratio for drift in report.tensors] == sorted((d.ratio for d in report.tensors), reverse=True)
    assert "2 of 5 tensors" in report.sentence
    assert json.loads(json_from_drift(report))["tensors"][0]["ratio"] == report.tensors[0].ratio
    assert table_from_drift(report).row_count == 5
    pytest.importorskip("matplotlib")
    assert "layers.0.mlp.up_proj" in html_from_drift(report, "growing", "short | 4", {"seed": "0"})


def test_clipped_is_what_the_values_say(decoder, data, observed, silent):
    """The drift report's shares, from values instead of histograms."""
    ranges = table_from_observed(observed, RangeConfig()).of("grown").strata
    long = [sample for sample in data.samples if data.stratum_of(sample) == "near-limit"]
    from pipeline.calibration.running import ObservingSession

    session = ObservingSession(decoder, ["grown"], longest=CONTEXT, chunk=512, threads=1)
    values = np.concatenate([tensors["grown"] for sample in long for tensors in session.run(sample)])
    share = np.mean(np.abs(values) > ranges["short"].high)
    drift = next(
        d for d in drift_of(observed, table_from_observed(observed, RangeConfig())).tensors if d.tensor == "grown"
    )
    assert drift.clipped == pytest.approx(share, rel=0.01)


def test_one_stratum_says_nothing_about_drift(cnn, silent):
    found = observe(cnn, drawn_set("images", images(), UNSIZED, ALL_OF_IT), ONE, silent)
    report = drift_of(found, table_from_observed(found, RangeConfig()))
    assert report.tensors == ()
    assert "nothing can be said" in report.sentence


def test_the_table_is_the_same_each_time_and_bound_to_its_model(decoder, texts, silent, tmp_path):
    config = CalibrationConfig(data=DataConfig(samples=4), observe=ONE, ranges=RangeConfig("percentile"))
    first = calibrate([texts], decoder, config, silent)
    again = calibrate([texts], decoder, config, silent)
    assert first.table.to_json() == again.table.to_json()
    (tmp_path / "table.json").write_text(first.table.to_json())
    read = table_from_json(tmp_path / "table.json")
    assert read.percentile == 99.99
    assert read.samples == first.table.samples
    assert read.of("grown").range.high == pytest.approx(first.table.of("grown").range.high, rel=1e-5)
    read.require_model(decoder.model.sha256)
    with pytest.raises(KilnError, match="calibrate again"):
        read.require_model("f" * 64)


def invoke(*arguments):
    return CliRunner().invoke(calibrate_command, [*map(str, arguments), "--threads", "1"], catch_exceptions=False)


def test_the_command(decoder, texts, tmp_path):
    pytest.importorskip("matplotlib")
    out, page = tmp_path / "table.json", tmp_path / "drift.html"
    result = invoke(decoder.model.path, "--calibration", texts, "--out", out, "--html", page, "--method", "mse")
    assert result.exit_code == 0
    for text in ("near-limit  129 to 256 tokens", "4 samples", "layers.0.mlp.up_proj", "peak memory: "):
        assert text in result.stdout
    assert table_from_json(out).method == "mse"
    assert page.read_text().count("<svg") == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["drift.html", "table.json"]


def test_the_command_refuses_what_does_not_cover_the_traffic(decoder, tmp_path):
    short, traffic, out = tmp_path / "short.jsonl", tmp_path / "traffic.jsonl", tmp_path / "table.json"
    short.write_text("\n".join(json.dumps({"token_ids": [1, 2, 3] * 8}) for _ in range(12)))
    traffic.write_text('{"prompt_tokens": 20, "output_tokens": 5}\n{"prompt_tokens": 150, "output_tokens": 50}\n')
    options = ["--calibration", short, "--traffic", traffic, "--out", out]
    with pytest.raises(KilnError, match="near-limit is empty; add 4 samples of 129 to 256 tokens"):
        invoke(decoder.model.path, *options)
    assert not out.exists()
    result = invoke(decoder.model.path, *options, "--override-coverage", "--json")
    document = json.loads(result.stdout)
    assert "near-limit is empty" in document["warning"]
    assert "overridden: against the traffic" in table_from_json(out).warnings[0]
    assert document["drift"]["tensors"] == []


def test_the_command_writes_nothing_for_bad_input(decoder, texts, tmp_path):
    out = tmp_path / "table.json"
    (tmp_path / "one.jsonl").write_text('{"token_ids": [1]}')
    (tmp_path / "bad.jsonl").write_text('{"token_ids": [1]}\n{"token_ids": [61]}\n')
    for arguments, found in (
        (["--calibration", tmp_path / "one.jsonl"], "one sample"),
        (["--calibration", tmp_path / "bad.jsonl"], "line 2"),
        (["--calibration", texts, "--max-context", "100"], "more than the 100"),
        (["--calibration", texts, "--max-context", "1000"], "--max-context is 1000"),
        (["--calibration", texts, "--percentile", "10"], "percentile is 10"),
        ([], "no calibration data"),
    ):
        with pytest.raises(KilnError, match=found):
            invoke(decoder.model.path, "--out", out, *arguments)
    with pytest.raises(KilnError, match="a folder that exists"):
        invoke(decoder.model.path, "--calibration", texts, "--out", tmp_path / "absent" / "table.json")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bad.jsonl", "one.jsonl"]
