"""What runs an engine, over a stand-in in host memory: profiles, buffers, captured graphs, caches, allocators."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from engines.backends.base import StepInputs
from engines.backends.tensorrt.decoders import TensorRtLinearGraph, TensorRtPagedDecoder, widened
from engines.backends.tensorrt.layer_times import LayerTimes
from engines.backends.tensorrt.linear_decoder import LinearDecoder
from engines.backends.tensorrt.linear_graph import linear_graph
from engines.backends.tensorrt.plugin_graph import PluginTarget, plugin_graph
from engines.backends.tensorrt.profiles import ServingShapes, derive_profiles
from engines.backends.tensorrt.runtime import TensorRtModel
from passes.onnx_model import OnnxModel, onnx_model_from_path
from plugins.errors import KilnError
from plugins.paged_attention.schema import STEP_INPUTS
from tests.engines.host_runtime import HostRuntime

from .host_engine import HostEngine
from .plugin_layers import EVALUATED
from .serving import Shape, evaluated_steps, serving_graph

SERVING = ServingShapes(max_running=4, tokens_per_step=32, kv_blocks=4)


def with_onnxruntime(path: Path):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))


def plain_model(path: Path, nodes: list, output: list) -> OnnxModel:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", output[0], output[1])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return onnx_model_from_path(path)


def test_each_batch_takes_its_profile_and_is_captured_when_it_comes_again(tmp_path: Path) -> None:
    model = plain_model(tmp_path / "m.onnx", [helper.make_node("Add", ["x", "x"], ["y"])], [1, ["batch", 3]])
    profiles, runtime = derive_profiles(model.inputs, None, ServingShapes(max_batch=8)), HostRuntime()
    engine = HostEngine(model, profiles, with_onnxruntime(model.path))
    running = TensorRtModel(engine.opened(), model.inputs, profiles, runtime)
    for turn in range(5):
        for batch in (1, 2, 8):
            x = np.full((batch, 3), turn + batch, np.float32)
            assert (running.infer({"x": x})["y"] == 2 * x).all()
    assert [context.profile for context in engine.contexts[:2]] == [0, 1]
    assert engine.contexts[0].runs == 3
    assert engine.contexts[1].runs == 6
    assert len(runtime.launched) == 6, "two turns of three batches"
    with pytest.raises(KilnError, match=r"no profile of the engine takes these inputs .*x is \[9, 3\]"):
        running.infer({"x": np.zeros((9, 3), np.float32)})
    running.close()
    running.close()
    assert not runtime.live


def test_layers_are_timed_of_every_run_and_nothing_is_captured(tmp_path: Path) -> None:
    model = plain_model(tmp_path / "m.onnx", [helper.make_node("Add", ["x", "x"], ["y"])], [1, ["batch", 3]])
    profiles, runtime, times = (
        derive_profiles(model.inputs, None, ServingShapes(max_batch=8)),
        HostRuntime(),
        LayerTimes(),
    )
    engine = HostEngine(model, profiles, with_onnxruntime(model.path))
    running = TensorRtModel(engine.opened(), model.inputs, profiles, runtime, times)
    for turn in range(1, 6):
        for batch in (1, 8):
            assert (running.infer({"x": np.full((batch, 3), turn, np.float32)})["y"] == 2 * turn).all()
    assert times.runs == [[("fc_myl0_3", 0.25e-3), ("conv1_myl0_2", 0.5e-3)]] * 10
    assert not runtime.launched
    engine.contexts[0].reports = False
    with pytest.raises(KilnError, match="failed to report the times of its layers"):
        running.infer({"x": np.zeros((1, 3), np.float32)})
    running.close()
    assert not runtime.live


def test_an_output_whose_shape_depends_on_values_has_an_allocator(tmp_path: Path) -> None:
    model = plain_model(tmp_path / "m.onnx", [helper.make_node("NonZero", ["x"], ["y"])], [7, [2, "found"]])
    profiles, runtime = derive_profiles(model.inputs, None, ServingShapes(max_batch=4)), HostRuntime()
    running = TensorRtModel(
        HostEngine(model, profiles, with_onnxruntime(model.path)).opened(), model.inputs, profiles, runtime
    )
    rng = np.random.default_rng(0)
    for batch in (1, 4, 4, 2, 4, 4):
        x = rng.integers(0, 2, (batch, 3)).astype(np.float32)
        assert (running.infer({"x": x})["y"] == np.array(np.nonzero(x))).all()
    assert running.infer({"x": np.zeros((1, 3), np.float32)})["y"].shape == (2, 0)
    running.close()
    assert not runtime.live


def test_other_profiles_than_the_bundles_are_refused(tmp_path: Path) -> None:
    model = plain_model(tmp_path / "m.onnx", [helper.make_node("Add", ["x", "x"], ["y"])], [1, ["batch", 3]])
    profiles = derive_profiles(model.inputs, None, ServingShapes(max_batch=4))
    engine = HostEngine(model, profiles, with_onnxruntime(model.path))
    with pytest.raises(KilnError, match="the engine has 2 profiles, its bundle 1"):
        TensorRtModel(engine.opened(), model.inputs, profiles[:1], HostRuntime())


@pytest.mark.parametrize("form", ["plugin", "native"])
def test_a_decoder_keeps_its_cache_on_the_device(form: str, tmp_path: Path) -> None:
    model, runtime = serving_graph(tmp_path / "model.onnx", Shape(packed=True)), HostRuntime()
    if form == "plugin":
        made, _ = plugin_graph(model, tmp_path / "made.onnx", PluginTarget("sm_89", 58, 4))
        graph = ReferenceEvaluator(onnx.load(made.path), new_ops=EVALUATED)
        names = [output.name for output in made.outputs]
        evaluate = lambda feeds: dict(zip(names, graph.run(names, feeds), strict=True))  # noqa: E731
    else:
        made = linear_graph(model, tmp_path / "made.onnx", "float16")
        evaluate = with_onnxruntime(made.path)
    assert made.decoder is not None
    kv, profiles = made.decoder.kv, derive_profiles(made.inputs, made.decoder, SERVING)
    engine = HostEngine(made, profiles, evaluate)
    if form == "plugin":
        decoder = TensorRtPagedDecoder(engine.opened(), made.inputs, profiles, runtime, kv)
        assert decoder.num_blocks == SERVING.kv_blocks
    else:
        graph = TensorRtLinearGraph(engine.opened(), made.inputs, profiles, runtime, kv)
        decoder = LinearDecoder(graph, kv, graph.rows)
        assert decoder.num_blocks == SERVING.max_running
    assert model.decoder is not None
    for number, (expected, feeds) in enumerate(evaluated_steps(model, model.decoder.kv)):
        step = {name: feeds[name] for name in STEP_INPUTS}
        if form == "native":
            step["block_table"] = np.array([[3], [1]], np.int32)
        found = decoder.step(StepInputs(**step))
        assert np.abs(found - expected).max() <= 2e-2 * np.abs(expected).max()
        if number == 1:  # to a block that nobody holds, and back
            if form == "plugin":
                decoder.move_blocks([(3, 1), (1, 3)])
            else:
                decoder.move_blocks([(1, 0), (0, 1)])
    nothing = {**step, "logits_indices": np.zeros(0, np.int32)}
    assert decoder.step(StepInputs(**nothing)).shape == (0, expected.shape[1])
    decoder.close()
    decoder.close()
    assert not runtime.live


def test_block_tables_have_few_widths() -> None:
    table = np.arange(10, dtype=np.int32).reshape(2, 5)
    assert widened(table, 8).shape == (2, 8)
    assert widened(table, 6).shape == (2, 6)
    assert (widened(table, 8)[:, :5] == table).all()
    with pytest.raises(KilnError, match="5 blocks, the engine was built for 4"):
        widened(table, 4)
