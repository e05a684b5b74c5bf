"""The pass manager: order, rollback, reports, and what is on disk before, during and after."""

import os
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from onnx import numpy_helper, parser

from passes.base import Effect, Outcome
from passes.graph import graph_from_path
from passes.manager import LIMITS, Errors, Timing, run_passes
from passes.onnx_model import external_files, load_structure, onnx_model_from_path
from passes.pattern import new_constant, values_of
from plugins.errors import KilnError


@dataclass
class Scale:
    """Multiplies the weight: a rewrite whose error is known."""

    factor: float = 2.0
    effect: Effect = Effect.REORDERS
    name: str = "scale"

    def call(self, graph: gs.Graph) -> Outcome:
        node = graph.nodes[0]
        node.inputs[1] = new_constant(node.outputs[0], f"times_{self.factor}", self.factor * values_of(node.inputs[1]))
        return Outcome(1, ["a note"])


@dataclass
class Idle:
    name: str = "idle"
    effect: Effect = Effect.EXACT

    def call(self, graph: gs.Graph) -> Outcome:
        return Outcome()


@dataclass
class Broken:
    """Leaves the graph half rewritten and fails, or leaves it unsound and does not notice."""

    notices: bool
    name: str = "broken"
    effect: Effect = Effect.EXACT

    def call(self, graph: gs.Graph) -> Outcome:
        graph.nodes[1].inputs[0] = gs.Variable("nowhere")
        if self.notices:
            raise IndexError("list index out of range")
        return Outcome(1)


def write_model(folder, external: bool):
    path = folder / "model.onnx"
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        main (float[n,40] x) => (float[n,40] y) { a = MatMul(x, w)  y = Relu(a) }"""
    )
    weight = np.random.default_rng(0).normal(size=(40, 40)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    model.metadata_props.add(key="origin", value="here")
    onnx.save(model, path, save_as_external_data=external, location="model.data", size_threshold=0)
    return onnx_model_from_path(path)


@pytest.fixture(params=[True, False], ids=["external", "one file"])
def model(request, tmp_path):
    (tmp_path / "source").mkdir()
    return write_model(tmp_path / "source", request.param)


def weight_gate(before, after):
    """The error of the weights, which the tests' passes change."""
    reference, found = (
        values_of(graph_from_path(path).nodes[0].inputs[1]).astype(np.float64) for path in (before, after)
    )
    error = float(np.abs(found - reference).max())
    return Errors(error, error / float(np.abs(reference).max()), 1.0, "y")


def weight_of(path):
    return numpy_helper.to_array(onnx.load(path).graph.initializer[0])


def test_passes_run_in_order_and_everything_is_reported(model, tmp_path):
    seen = []
    before = weight_of(model.path)
    rewritten, reports = run_passes(model, tmp_path / "out.onnx", [Scale(2.0), Idle(), Scale(4.0)], observe=seen.append)
    np.testing.assert_array_equal(weight_of(rewritten.path), 8 * before)
    assert list(reports) == seen
    assert [(r.name, r.rewrites, r.changed, r.notes) for r in reports] == [
        ("scale", 1, True, ("a note",)),
        ("idle", 0, False, ()),
        ("scale", 1, True, ("a note",)),
    ]
    assert all(report.nodes_before == report.nodes_after == {"MatMul": 1, "Relu": 1} for report in reports)
    assert all(report.errors is None and report.timing is None and report.seconds > 0 for report in reports)
    assert {entry.key: entry.value for entry in load_structure(rewritten.path).metadata_props} == {"origin": "here"}


def test_what_lies_at_the_target(model, tmp_path):
    source = {file.name: file.read_bytes() for file in model.path.parent.iterdir()}
    run_passes(model, tmp_path / "out.onnx", [Scale()])
    external = bool(external_files(model.path, load_structure(model.path)))
    assert set(os.listdir(tmp_path)) == {"source", "out.onnx", *(["out.onnx.data"] if external else [])}
    assert {file.name: file.read_bytes() for file in model.path.parent.iterdir()} == source


def test_untouched_weights_keep_their_file(tmp_path):
    """A copy of its own: onnx refuses to load weights from a file with several hard links."""
    (tmp_path / "source").mkdir()
    model = write_model(tmp_path / "source", external=True)
    rewritten, _ = run_passes(model, tmp_path / "out.onnx", [Idle()])
    assert (tmp_path / "model.data").read_bytes() == (tmp_path / "source" / "model.data").read_bytes()
    onnx.load(rewritten.path)


def test_a_target_beside_the_model_shares_its_weights(tmp_path):
    model = write_model(tmp_path, external=True)
    run_passes(model, tmp_path / "out.onnx", [Idle()])
    run_passes(model, tmp_path / "out2.onnx", [Scale()])
    run_passes(model, tmp_path / "out2.onnx", [Scale()])
    assert set(os.listdir(tmp_path)) == {"model.onnx", "model.data", "out.onnx", "out2.onnx", "out2.onnx.data"}
    for name in ("model", "out", "out2"):
        onnx.load(tmp_path / f"{name}.onnx")


@pytest.mark.parametrize("notices", [True, False])
def test_a_broken_pass_is_rolled_back_and_the_next_one_runs(model, tmp_path, notices):
    before = weight_of(model.path)
    rewritten, (broken, scale) = run_passes(model, tmp_path / "out.onnx", [Broken(notices), Scale()])
    assert not broken.changed
    assert ("IndexError: list index" if notices else "reads 'nowhere'") in broken.rolled_back
    assert scale.changed
    np.testing.assert_array_equal(weight_of(rewritten.path), 2 * before)


def test_a_pass_beyond_its_tolerance_is_rolled_back(model, tmp_path):
    passes = [
        Scale(1 + 5e-5),
        Scale(1.01),
        replace(Scale(1.01), effect=Effect.PRECISION),
        Scale(1 + 2e-5, Effect.EXACT),
    ]
    before = weight_of(model.path)
    rewritten, reports = run_passes(model, tmp_path / "out.onnx", passes, gate=weight_gate)
    assert [report.changed for report in reports] == [True, False, True, False]
    assert reports[1].rolled_back == (
        "relative error 0.01 at output 'y' is above 0.0001, the limit for a pass that reorders sums"
    )
    assert "above 1e-06, the limit for a pass that is exact" in reports[3].rolled_back
    assert reports[1].errors.relative == pytest.approx(0.01, rel=1e-3)
    assert [report.limit for report in reports] == [1e-4, 1e-4, 5e-2, 1e-6]
    np.testing.assert_allclose(weight_of(rewritten.path), 1.01 * (1 + 5e-5) * before, rtol=1e-6)


@pytest.mark.parametrize(("noise", "kept"), [(1e-5, False), (4e-4, True), (1.0, True)])
def test_a_sensitive_model_may_err_as_much_as_the_backends_own_rewrites_do(model, tmp_path, noise, kept):
    passes = [Scale(1 + 3e-4), Scale(1.01)]
    _, reports = run_passes(model, tmp_path / "out.onnx", passes, gate=weight_gate, noise=lambda path: noise)
    assert [report.changed for report in reports] == [kept, False], "never more than ten times the limit"
    assert reports[0].limit == max(1e-4, min(noise, 1e-3))


def test_a_pass_that_changes_the_model_is_only_reported(model, tmp_path):
    _, (report,) = run_passes(model, tmp_path / "out.onnx", [Scale(3.0, Effect.MODEL)], gate=weight_gate)
    assert report.changed
    assert report.errors.relative == pytest.approx(2.0)
    assert report.limit is None
    assert set(LIMITS) == set(Effect)


def test_errors_that_are_no_number_are_beyond_any_limit(model, tmp_path):
    nan = float("nan")
    passes = [Scale(), Scale(effect=Effect.PRECISION)]
    _, reports = run_passes(model, tmp_path / "out.onnx", passes, gate=lambda before, after: Errors(nan, nan, nan, "y"))
    assert [report.changed for report in reports] == [False, False]


def test_a_model_that_no_longer_runs_is_rolled_back(model, tmp_path):
    def gate(before, after):
        raise RuntimeError("no kernel for MatMul\nand more")

    before = weight_of(model.path)
    rewritten, (report,) = run_passes(model, tmp_path / "out.onnx", [Scale()], gate=gate)
    assert report.rolled_back == "the rewritten model does not run: no kernel for MatMul"
    np.testing.assert_array_equal(weight_of(rewritten.path), before)


def test_the_clock_is_asked_for_passes_that_are_kept(model, tmp_path):
    asked = []

    def clock(before, after):
        asked.append((before.name, after.name))
        return Timing(2.0, 1.0, 0.1)

    passes = [Scale(1.01), Idle(), Scale(1.0)]
    _, reports = run_passes(model, tmp_path / "out.onnx", passes, gate=weight_gate, clock=clock)
    assert [report.timing is not None for report in reports] == [False, False, True]
    assert len(asked) == 1


@pytest.mark.parametrize(("after", "pays"), [(0.8, True), (0.95, None), (1.05, None), (1.2, False)])
def test_what_pays(after, pays):
    assert Timing(1.0, after, 0.1).pays is pays


def test_a_target_of_the_same_name_elsewhere_leaves_the_source_alone(tmp_path):
    """The workspace has the source's weights under their own name."""
    (tmp_path / "source").mkdir()
    (tmp_path / "target").mkdir()
    model = write_model(tmp_path / "source", external=True)
    proto = load_structure(model.path)
    proto.graph.initializer[0].external_data[0].value = "model.onnx.data"
    model.path.write_bytes(proto.SerializeToString())
    (model.path.parent / "model.data").rename(model.path.parent / "model.onnx.data")
    source = {file.name: file.read_bytes() for file in model.path.parent.iterdir()}
    rewritten, _ = run_passes(onnx_model_from_path(model.path), tmp_path / "target" / "model.onnx", [Scale()])
    assert {file.name: file.read_bytes() for file in model.path.parent.iterdir()} == source
    np.testing.assert_array_equal(weight_of(rewritten.path), 2 * weight_of(model.path))
    assert sorted(os.listdir(tmp_path / "target")) == ["model.onnx", "model.onnx.data"]


def test_a_failure_leaves_nothing(model, tmp_path):
    def observe(report):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_passes(model, tmp_path / "out.onnx", [Scale()], observe=observe)
    assert os.listdir(tmp_path) == ["source"]


def test_an_unsound_model_is_refused_by_name(model, tmp_path):
    proto = load_structure(model.path)
    proto.graph.node[1].input[0] = "nowhere"
    model.path.write_bytes(proto.SerializeToString())
    with pytest.raises(KilnError, match=r"model\.onnx: node .* reads 'nowhere'"):
        run_passes(model, tmp_path / "out.onnx", [Idle()])
    assert os.listdir(tmp_path) == ["source"]
