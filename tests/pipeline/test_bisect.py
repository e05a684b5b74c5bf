"""Bisecting: cuts at common borders only, and the layers that were changed are the ones that are found."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from engines.sku import resolve_sku
from passes.onnx_model import onnx_model_from_path
from pipeline.bisect.cuts import Side, common_cuts
from pipeline.bisect.passes import PassParts
from pipeline.bisect.search import GraphParts, search
from pipeline.progress import Progress
from pipeline.quantize.judge import PlainJudge
from plugins.errors import KilnError

WIDTH, LAYERS = 8, 6
FEEDS = {"x": np.random.default_rng(9).normal(size=(5, WIDTH)).astype(np.float32)}


def chain(changes=(), fused=(), noise: float = 0.1) -> onnx.ModelProto:
    """LAYERS layers, y = x + relu(x W + b), the weights of `changes` disturbed; `fused`: MatMul and Add are one Gemm.

    A shape is read at the beginning and used in every layer.
    """
    nodes = [helper.make_node("Shape", ["x"], ["shape"])]
    weights, value = [], "x"
    for layer in range(LAYERS):
        generator = np.random.default_rng(layer)
        weight = generator.normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH
        bias = generator.normal(size=WIDTH).astype(np.float32)
        if layer in changes:
            weight = weight + np.random.default_rng(layer + 50).normal(size=weight.shape).astype(np.float32) * noise
        weights += [numpy_helper.from_array(weight, f"w{layer}"), numpy_helper.from_array(bias, f"b{layer}")]
        if layer in fused:
            nodes.append(helper.make_node("Gemm", [value, f"w{layer}", f"b{layer}"], [f"sum{layer}"], f"layer{layer}"))
        else:
            nodes.append(helper.make_node("MatMul", [value, f"w{layer}"], [f"product{layer}"], f"layer{layer}"))
            nodes.append(helper.make_node("Add", [f"product{layer}", f"b{layer}"], [f"sum{layer}"]))
        nodes.append(helper.make_node("Relu", [f"sum{layer}"], [f"relu{layer}"]))
        nodes.append(helper.make_node("Reshape", [f"relu{layer}", "shape"], [f"same{layer}"]))
        nodes.append(helper.make_node("Add", [value, f"same{layer}"], [f"y{layer}"]))
        value = f"y{layer}"
    nodes[-1].output[0] = "y"
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", WIDTH]) for name in "xy"]
    graph = helper.make_graph(nodes, "chain", tensors[:1], tensors[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def found_between(folder: Path, a: onnx.ModelProto, b: onnx.ModelProto, **options):
    paths = [folder / "a.onnx", folder / "b.onnx"]
    for path, model in zip(paths, (a, b), strict=True):
        onnx.save(model, path)
    judge = PlainJudge(paths[0], [], [("all", FEEDS)], optimized=False)
    return search(GraphParts(*paths, lambda path: judge(path)["all"].error, Progress()), **options)


def layers_in(part) -> set[int]:
    return {int(name.removeprefix("layer")) for name in part.names if name.startswith("layer")}


def test_the_changed_layer_is_found(tmp_path):
    found = found_between(tmp_path, chain(), chain([3]))
    assert layers_in(found.first) == {3}
    assert found.error_before_first == 0
    assert [layers_in(part) for part, _ in found.culprits] == [{3}]
    assert found.explained == 1


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.sets(st.integers(0, LAYERS - 1), min_size=1), fused=st.sets(st.integers(0, LAYERS - 1)))
def test_only_changed_layers_are_blamed_and_they_explain_the_error(tmp_path, changes, fused):
    found = found_between(tmp_path, chain(), chain(changes, fused), explain=0.8)
    blamed = set().union(*(layers_in(part) for part, error in found.culprits if error > 1e-6))
    assert blamed
    assert blamed <= changes
    assert found.explained >= 0.8
    assert layers_in(found.first) <= changes
    assert found.error_at_first >= 0.5 * found.error > found.error_before_first


def test_a_fused_operator_is_not_cut_through(tmp_path):
    paths = [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    for path, model in zip(paths, (chain(), chain(fused=[2])), strict=True):
        onnx.save(model, path)
    crossing = {name for cut in common_cuts(*map(Side, paths)) for name in cut.tensors}
    assert "product1" in crossing
    assert "product2" not in crossing
    assert "shape" not in crossing  # each half reads it for itself


def test_the_first_part_alone_takes_few_runs(tmp_path):
    found = found_between(tmp_path, chain(), chain(range(LAYERS)), first_only=True)
    assert found.culprits == ()
    assert found.first is not None


def test_what_is_the_same_is_said_to_be(tmp_path):
    found = found_between(tmp_path, chain(), chain())
    assert (found.error, found.first, found.changed) == (0, None, ())


def test_graphs_of_other_models_are_refused(tmp_path):
    other = chain()
    other.graph.output[0].name = other.graph.node[-1].output[0] = "z"
    with pytest.raises(KilnError, match=r"has the outputs y, .* has z; give two graphs of one model"):
        found_between(tmp_path, chain(), other)
    strange = chain()
    for node in strange.graph.node:
        for names in (node.input, node.output):
            names[:] = [n if n in ("x", "y") or n[0] in "wb" else f"other_{n}" for n in names]
    with pytest.raises(KilnError, match="no place in common where both could be cut"):
        found_between(tmp_path, chain(), strange)


def test_bodies_of_conditions_keep_what_they_read_outside(tmp_path):
    """If's bodies read a tensor of the cut and a weight."""

    def model(noise: float) -> onnx.ModelProto:
        made = chain([1], noise=noise)
        info = helper.make_tensor_value_info("body", TensorProto.FLOAT, ["n", WIDTH])
        bodies = {
            f"{name}_branch": helper.make_graph(
                [helper.make_node("MatMul", ["y3", weight], ["body"])], name, [], [info]
            )
            for name, weight in (("then", "w0"), ("else", "w1"))
        }
        condition = helper.make_node("If", ["yes"], ["chosen"], "condition", **bodies)
        made.graph.initializer.append(numpy_helper.from_array(np.array(False), "yes"))
        last = made.graph.node[-1]
        del made.graph.node[-1]
        made.graph.node.extend([condition, helper.make_node("Add", ["chosen", "y3"], ["mixed"])])
        made.graph.node.append(helper.make_node("Add", ["mixed", last.input[1]], ["y"]))
        return made

    found = found_between(tmp_path, model(0.0), model(0.2))
    blamed = {name for part, _ in found.culprits for name in part.names}
    assert blamed <= {"layer1", "condition"}
    assert found.explained >= 0.9


def test_passes_that_change_results_are_found(tmp_path):
    """Folding a BatchNorm reorders sums; nothing else in this model does."""
    generator = np.random.default_rng(0)
    shapes = {"w": (4, 3, 3, 3), "scale": (4,), "shift": (4,), "mean": (4,), "var": (4,)}
    weights = [
        numpy_helper.from_array(np.abs(generator.normal(size=shape)).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("Conv", ["same", "w"], ["conv"], "conv"),
        helper.make_node("BatchNormalization", ["conv", "scale", "shift", "mean", "var"], ["y"], "norm"),
    ]
    tensors = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 9, 9]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4, 7, 7]),
    ]
    graph = helper.make_graph(nodes, "net", tensors[:1], tensors[1:], weights)
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    model = onnx_model_from_path(path)
    feeds = {"x": generator.normal(size=(2, 3, 9, 9)).astype(np.float32)}
    judge = PlainJudge(path, [], [("all", feeds)], optimized=False)
    parts = PassParts(model, resolve_sku("cpu"), lambda path: judge(path)["all"].error, Progress())
    found = search(parts)
    assert {part.label for part in found.changed} >= {"fold_batch_norm", "remove_no_ops"}
    assert found.first.label == "fold_batch_norm"
    assert [part.label for part, _ in found.culprits] == ["fold_batch_norm"]


def test_the_command(tmp_path):
    onnx.save(chain(), tmp_path / "a.onnx")
    onnx.save(chain([4]), tmp_path / "b.onnx")
    command = [sys.executable, "-c", "from pipeline.cli import *; run_command(kiln_group)", "bisect"]
    command += [str(tmp_path / "a.onnx"), str(tmp_path / "b.onnx")]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert document["first"]["names"] == ["layer4"]
    assert "layer4" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    wrong = subprocess.run([*command, "--share", "0"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, "share is 0.0" in wrong.stderr) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx", "b.onnx"]
