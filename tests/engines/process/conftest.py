"""Bundles that engines in processes of their own are opened on."""

import numpy as np
import onnx
import pytest

CONTEXT, POISONED = 4096, 3000


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model(max_context=CONTEXT)


@pytest.fixture(scope="module")
def bundle(make_bundle, model, cpu_plugin):
    """The tiny model with a long context, and without a tokenizer, whose libraries take seconds to import."""
    return make_bundle(model.path, model.decoder, cpu_plugin)


@pytest.fixture(scope="module")
def poisoned_bundle(make_bundle, model, cpu_plugin, tmp_path_factory):
    """The same, but a request that reaches the position POISONED fails."""
    graph = onnx.load(model.path)
    (positions,) = (weight for weight in graph.graph.initializer if weight.name == "positions")
    values = onnx.numpy_helper.to_array(positions).copy()
    values[POISONED] = np.nan
    positions.CopyFrom(onnx.numpy_helper.from_array(values, "positions"))
    path = tmp_path_factory.mktemp("poisoned") / "poisoned.onnx"
    onnx.save(graph, path)
    return make_bundle(path, model.decoder, cpu_plugin)


@pytest.fixture(scope="module")
def endless_bundle(make_bundle, tmp_path_factory):
    """A model without a cache that loops as often as its input says."""
    helper = onnx.helper
    scalar = [("i", 7, []), ("go_on", 9, [])]
    body = helper.make_graph(
        [helper.make_node("Identity", ["go_on"], ["still"]), helper.make_node("Add", ["state", "state"], ["next"])],
        "body",
        [*(helper.make_tensor_value_info(*value) for value in scalar), helper.make_tensor_value_info("state", 7, [])],
        [helper.make_tensor_value_info("still", 9, []), helper.make_tensor_value_info("next", 7, [])],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["times", "", "times"], ["y"], body=body)],
        "endless",
        [helper.make_tensor_value_info("times", 7, [])],
        [helper.make_tensor_value_info("y", 7, [])],
    )
    path = tmp_path_factory.mktemp("endless") / "endless.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return make_bundle(path)
