"""`kiln optimize` end to end: switches, reports, what lies on disk, messages; and the same passes in build-engine."""

import json
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper, parser

from engines.runtime.engine import Engine
from passes.onnx_model import onnx_model_from_path
from passes.standard import PassSwitches, PassTarget, pass_names, standard_passes
from pipeline.build import build
from pipeline.cli import kiln_group
from pipeline.cli_optimize import switches_from_options
from pipeline.compare.bundle_subject import bundle_subject_from_path
from pipeline.config import BuildConfig
from pipeline.verify import run_plain
from plugins.errors import KilnError

NET = """<ir_version: 10, opset_import: ["" : 21]>
main (float[n,3,16,16] image) => (float[n,5] scores) {
    zero = Constant <value_float = 0.0> ()
    c = Conv <pads = [1, 1, 1, 1]> (image, k)
    b = BatchNormalization (c, scale, shift, mean, var)
    r = Relu(b)
    d = Dropout(r)
    p = GlobalAveragePool(d)
    f = Flatten(p)
    s = Sigmoid(f)
    g = Mul(f, s)
    scores = MatMul(g, w)
}"""


def write_net(path: Path) -> Path:
    generator = np.random.default_rng(0)
    model = parser.parse_model(NET)
    for name, shape in {"k": (8, 3, 3, 3), "scale": (8,), "shift": (8,), "mean": (8,), "w": (8, 5)}.items():
        values = generator.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    variance = generator.uniform(0.5, 2, 8).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(variance, "var"))
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path


@pytest.fixture
def net(tmp_path):
    return write_net(tmp_path / "net.onnx")


def optimize(*arguments):
    """Exit code, and the printed document or the message."""
    result = CliRunner().invoke(kiln_group, ["optimize", *map(str, arguments)])
    if isinstance(result.exception, KilnError):
        return 2, str(result.exception)
    return result.exit_code, result.stdout


def report_of(net, *arguments):
    out = net.with_name("out.onnx")
    code, text = optimize(net, "--out", out, "--overwrite", "--json", *arguments)
    assert code == 0, text
    document = json.loads(text)
    return out, {record["name"]: record for record in reversed(document["passes"])}  # clean-ups run twice


def operators(path):
    return [node.op_type for node in onnx.load(path).graph.node]


def test_all_passes_by_default(net):
    out, passes = report_of(net)
    assert "BatchNormalization" not in operators(out)
    assert "Dropout" not in operators(out)
    assert "QuickGelu" in operators(out)
    for name in ("fold_batch_norm", "remove_no_ops", "fuse_swiglu"):
        record = passes[name]
        assert record["changed"]
        assert record["relative_error"] <= record["limit"]
        assert record["cosine"] > 0.999999
        assert record["seconds"] > 0
        assert record["nodes_before"] != record["nodes_after"]
    image = np.random.default_rng(1).normal(size=(2, 3, 16, 16)).astype(np.float32)
    before, after = (run_plain(path, [], [{"image": image}])[0]["scores"] for path in (net, out))
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


def test_batch_norm_in_training_mode_is_left_with_a_message(net):
    model = onnx.load(net)
    norm = next(node for node in model.graph.node if node.op_type == "BatchNormalization")
    norm.attribute.append(onnx.helper.make_attribute("training_mode", 1))
    norm.output.extend(["running_mean", "running_var"])
    onnx.save(model, net)
    result = CliRunner().invoke(kiln_group, ["optimize", str(net), "--out", str(net.with_name("out.onnx"))])
    assert result.exit_code == 0
    assert "training mode" in result.stderr
    assert "BatchNormalization" in operators(net.with_name("out.onnx"))


@pytest.mark.parametrize("name", ["fold_batch_norm", "remove_no_ops", "fuse_swiglu"])
def test_every_pass_has_a_switch(net, name):
    _, without = report_of(net, "--disable", name)
    assert name not in without
    _, only = report_of(net, "--only", name)
    assert set(only) == {name}
    assert only[name]["changed"]


def test_passes_off_by_default_can_be_enabled(net):
    _, passes = report_of(net, "--enable", "prune_structure", "--pass-option", "prune_structure.conv=0.5")
    assert passes["prune_structure"]["rewrites"] == 1
    assert passes["prune_structure"]["effect"] == "changes the model"


def test_twice_changes_nothing_more(net):
    out, _ = report_of(net)
    again = out.with_name("again.onnx")
    code, text = optimize(out, "--out", again, "--json")
    assert code == 0
    assert [record["name"] for record in json.loads(text)["passes"] if record["changed"]] == []
    assert [node.SerializeToString() for node in onnx.load(again).graph.node] == [
        node.SerializeToString() for node in onnx.load(out).graph.node
    ]


def test_measuring_times_the_passes_that_changed_something(net, monkeypatch):
    from pipeline.verify import StepClock

    monkeypatch.setattr(StepClock.__init__, "__defaults__", (*StepClock.__init__.__defaults__[:-1], 0.01))
    _, passes = report_of(net, "--measure", "--no-verify")
    assert all((record["seconds_after"] is not None) == record["changed"] for record in passes.values())
    assert all(record["relative_error"] is None for record in passes.values())


def test_the_table_says_what_happened(net):
    code, text = optimize(net, "--out", net.with_name("out.onnx"))
    assert code == 0
    assert "fold_batch_norm" in text
    assert "-1 BatchNormalization" in text
    assert "nothing to do" in text
    assert text.splitlines()[-1] == str(net.with_name("out.onnx"))


def test_the_list_of_passes():
    code, text = optimize("--list", "--json")
    assert code == 0
    assert tuple(record["name"] for record in json.loads(text)) == pass_names()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "no_such_pass"], "there is no pass 'no_such_pass'; known are bind_attention"),
        (["--disable", "no_such_pass"], "there is no pass 'no_such_pass'"),
        (["--pass-option", "fold_constants.limit=3"], "has no option limit; it has size_limit"),
        (["--pass-option", "fold_constants=3"], "is not NAME.KEY=VALUE"),
        (["--pass-option", "prune_structure.conv=1.5"], "x"),
        (["--sku", "h999"], "unknown SKU 'h999'"),
        (["--sku", "h200", "--measure"], "this machine cannot time graphs for SKU h200"),
        (["--inputs", "nothing.npz"], "inputs nothing.npz are no .npz of arrays"),
    ],
)
def test_wrong_options_are_refused_and_nothing_is_written(net, arguments, message):
    if message == "x":
        arguments, message = [*arguments, "--enable", "prune_structure"], "pass prune_structure: conv is 1.5"
    code, text = optimize(net, "--out", net.with_name("out.onnx"), *arguments)
    assert code == 2
    assert message in text
    assert os.listdir(net.parent) == ["net.onnx"]


def test_targets_that_would_lose_something(net):
    assert "is the model itself" in optimize(net, "--out", net)[1]
    assert "is a folder" in optimize(net, "--out", net.parent)[1]
    other = net.with_name("other.onnx")
    other.write_bytes(b"kept")
    assert f"{other} exists; choose another name, or add --overwrite" in optimize(net, "--out", other)[1]
    assert other.read_bytes() == b"kept"
    onnx.save(onnx.load(net), net, save_as_external_data=True, location="new.onnx.data", size_threshold=0)
    assert "which holds the model's own weights" in optimize(net, "--out", net.with_name("new.onnx"))[1]


def test_image_layout_as_cameras_deliver(net, silent):
    out, passes = report_of(net, "--io-layout", "nhwc")
    assert passes["io_layout_nhwc"]["relative_error"] == 0
    assert onnx_model_from_path(out).inputs[0].shape == ("n", 16, 16, 3)
    image = np.random.default_rng(1).normal(size=(2, 3, 16, 16)).astype(np.float32)
    before, after = (run_plain(path, [], [{"image": image}])[0]["scores"] for path in (net, out))
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)
    bundle = build(str(net), ["cpu"], BuildConfig(out=net.parent / "bundle", io_layout="nhwc"), silent)[0].bundle
    with Engine.open(bundle.path) as engine:
        scores = engine.infer({"image": np.ascontiguousarray(image.transpose(0, 2, 3, 1))})["scores"]
    np.testing.assert_allclose(scores, before, rtol=1e-5, atol=1e-6)
    subject = bundle_subject_from_path(bundle.path)
    assert subject.inputs[0].shape == ("n", 3, 16, 16), "comparisons feed it as they feed the original"
    np.testing.assert_allclose(subject.infer({"image": image})["scores"], before, rtol=1e-5, atol=1e-6)
    subject.close()


@pytest.mark.parametrize(
    ("precision", "kind"), [("fp16", onnx.TensorProto.FLOAT16), ("bf16", onnx.TensorProto.BFLOAT16)]
)
def test_precision_is_judged_with_its_own_limit(net, precision, kind):
    out, passes = report_of(net, "--precision", precision, "--sku", "h200")
    record = passes["cast_precision"]
    assert record["limit"] == 5e-2
    assert record["changed"], record["rolled_back"]
    judged = record["relative_error"] is not None
    assert judged or record["notes"][-1] == "not judged: this machine's CPU has no kernels for this graph"
    assert judged or precision == "bf16"
    assert kind in {tensor.data_type for tensor in onnx.load(out).graph.initializer}


def test_a_precision_that_this_machine_cannot_run_is_not_kept_for_it(net):
    _, passes = report_of(net, "--precision", "bf16")
    record = passes["cast_precision"]
    assert record["changed"] or "the rewritten model does not run" in record["rolled_back"]


def test_a_build_reports_its_passes_and_takes_their_switches(net, silent, tmp_path):
    config = BuildConfig(out=tmp_path / "bundle", passes=PassSwitches(disable=("fold_batch_norm",)))
    manifest = build(str(net), ["cpu"], config, silent)[0].bundle.manifest
    passes = {record.name: record for record in manifest.passes}
    assert "fold_batch_norm" not in passes
    assert passes["fuse_swiglu"].relative_error <= passes["fuse_swiglu"].limit
    assert manifest.checks[0].name == "outputs against the unoptimised graph"
    with pytest.raises(KilnError, match="there is no pass 'nothing'"):
        BuildConfig(passes=PassSwitches(only=("nothing",)))


def test_groups_are_listed_and_a_keep_list_is_taken_from_a_file(net, tmp_path, silent):
    code, text = optimize(net, "--list-groups", "--json")
    assert code == 0
    (group,) = json.loads(text)["groups"]
    assert (group["kind"], group["units"]) == ("conv", 8)
    keep = tmp_path / "keep.json"
    keep.write_text(json.dumps({group["name"]: [0, 3, 5]}))
    out, passes = report_of(net, "--enable", "prune_structure", "--pass-option", f"prune_structure.keep=@{keep}")
    assert passes["prune_structure"]["rewrites"] == 1
    assert {tuple(tensor.dims) for tensor in onnx.load(out).graph.initializer} >= {(3, 3, 3, 3), (3, 5)}
    keep.write_text("{")
    code, text = optimize(net, "--out", tmp_path / "x.onnx", "--pass-option", f"prune_structure.keep=@{keep}")
    assert (code, "keep.json cannot be read as JSON" in text) == (2, True)


def test_a_pruned_model_is_published_with_its_error_and_without_a_limit(net, silent, tmp_path):
    switches = PassSwitches(enable=("prune_structure",), options={"prune_structure": {"conv": 0.5}})
    manifest = build(str(net), ["cpu"], BuildConfig(out=tmp_path / "bundle", passes=switches), silent)[
        0
    ].bundle.manifest
    (check,) = manifest.checks
    assert check.limit is None
    assert check.value > 1e-3
    assert "no limit (the model was changed on request" in check.sentence()


def test_switches_from_texts():
    switches = switches_from_options("a, b", ("c,d", "e"), (), ("a.x=1", "a.y=word", "b.z=[1, 2]"))
    assert switches.only == ("a", "b")
    assert switches.enable == ("c", "d", "e")
    assert switches.options == {"a": {"x": 1, "y": "word"}, "b": {"z": [1, 2]}}


def test_the_order_does_not_depend_on_how_passes_are_named():
    names = [p.name for p in standard_passes(PassTarget(), PassSwitches(only=("remove_unused", "fold_constants")))]
    assert list(dict.fromkeys(names)) == ["fold_constants", "remove_unused"]  # clean-ups run twice
