"""The numeric gate and the clock, on models that really run."""

import math

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from passes.onnx_model import onnx_model_from_path
from pipeline.verify import NumericGate, StepClock, errors_between, feeds_from_file, generated_inputs
from plugins.errors import KilnError

NET = """<ir_version: 10, opset_import: ["" : 21]>
main (float[n,SIZE] x) => (float[n,8] y, int64[n] best) {
    y = MatMul(x, w)
    best = ArgMax <axis = 1, keepdims = 0> (y)
}"""


def write_net(path, scale=1.0, size="16"):
    model = parser.parse_model(NET.replace("SIZE", size))
    weight = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight * np.float32(scale), "w"))
    onnx.save(model, path)
    return path


def errors(expected, found):
    return errors_between([{"y": np.asarray(expected)}], [{"y": np.asarray(found)}])


def test_errors_are_the_worst_over_outputs_and_inputs():
    a = {"p": np.array([1.0, -2.0]), "q": np.array([10.0, 0.0])}
    b = {"p": np.array([1.0, -2.1]), "q": np.array([10.2, 0.0])}
    found = errors_between([a, a], [a, b])
    assert found.absolute == pytest.approx(0.2)
    assert found.relative == pytest.approx(0.05)
    assert found.output == "p"
    assert found.cosine == pytest.approx(5.2 / math.sqrt(5 * 5.41))


def test_values_that_are_not_finite():
    infinite = [1.0, -np.inf, np.nan]
    assert errors(infinite, infinite).relative == 0
    assert errors([1.0, -np.inf], [1.5, -np.inf]).relative == pytest.approx(0.5)
    for other in ([1.0, np.inf, np.nan], [1.0, -np.inf, 0.0], [np.nan, -np.inf, np.nan]):
        assert math.isnan(errors(infinite, other).relative)


def test_integers_must_be_equal():
    assert errors([1, 2], [1, 2]).relative == 0
    assert math.isnan(errors([1, 2], [1, 3]).relative)


def test_shapes_and_names_must_be_equal():
    with pytest.raises(KilnError, match=r"output 'y' has shape \(1, 2\); expected \(2,\)"):
        errors([1.0, 2.0], [[1.0, 2.0]])
    with pytest.raises(KilnError, match="the outputs are z; expected y"):
        errors_between([{"y": np.zeros(1)}], [{"z": np.zeros(1)}])


def test_the_gate_sees_what_changed(tmp_path):
    first, second, third = (
        write_net(tmp_path / f"{scale}.onnx", scale) for scale in (1.0, 1.0 + 2.0**-10, 1.0 + 2.0**-9)
    )
    gate = NumericGate(onnx_model_from_path(first))
    assert gate(first, first).relative == 0
    found = gate(first, second)
    assert found.relative == pytest.approx(2.0**-10, rel=1e-3)
    assert found.cosine == pytest.approx(1)
    # `second` was accepted and is the next one's reference.
    assert gate(second, third).relative == pytest.approx(2.0**-10, rel=2e-2)


def test_generated_inputs_have_a_long_one_where_a_size_varies(tmp_path):
    ids = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        main (int64[n,s] ids) => (float[n,s,2] y) {
            p = Gather(positions, ids)
            q = Gather(table, ids)
            y = Add(p, q)
        }"""
    )
    for name, rows in (("positions", 700), ("table", 900)):
        ids.graph.initializer.append(numpy_helper.from_array(np.ones((rows, 2), np.float32), name))
    onnx.save(ids, tmp_path / "ids.onnx")
    samples = generated_inputs(onnx_model_from_path(tmp_path / "ids.onnx"))
    assert [sample["ids"].shape for sample in samples][-1] == (1, 2048)
    assert max(sample["ids"].max() for sample in samples) < 700
    fixed = generated_inputs(onnx_model_from_path(write_net(tmp_path / "fixed.onnx")))
    assert {sample["x"].shape[1] for sample in fixed} == {16}


def test_a_model_that_random_inputs_do_not_suit(tmp_path):
    path = write_net(tmp_path / "net.onnx", size="m")  # m must be 16, which the graph does not say
    model = onnx_model_from_path(path)
    with pytest.raises(KilnError, match=r"Random inputs do not suit this model; give some with --inputs FILE\.npz"):
        NumericGate(model)
    np.savez(tmp_path / "inputs.npz", x=np.ones((3, 16), np.float32))
    gate = NumericGate(model, inputs=feeds_from_file(tmp_path / "inputs.npz"))
    assert gate(path, path).relative == 0


@pytest.mark.parametrize("content", [b"", b"not an archive", None])
def test_inputs_that_are_no_archive(tmp_path, content):
    path = tmp_path / "inputs.npz"
    if content is None:
        with path.open("wb") as stream:
            np.save(stream, np.ones(3))
    else:
        path.write_bytes(content)
    with pytest.raises(KilnError, match=r"are no \.npz of arrays"):
        feeds_from_file(path)


def test_the_clock_times_both(tmp_path):
    path = write_net(tmp_path / "net.onnx")
    timing = StepClock(onnx_model_from_path(path), seconds=0.05)(path, path)
    assert timing.before > 0
    assert timing.after > 0
    assert timing.noise >= 0


def test_a_serving_graph_is_judged_and_timed_in_packed_steps(tiny_llama_folder, tmp_path):
    """As exported, with the operator that ONNX Runtime has no CPU kernel for."""
    from pipeline.config import BuildConfig
    from pipeline.export import export_model
    from pipeline.load import load
    from pipeline.source import resolve_source
    from plugins.build import cpu_library

    model = export_model(load(resolve_source(str(tiny_llama_folder))), tmp_path / "llama.onnx", BuildConfig())
    gate = NumericGate(model, [cpu_library()])
    assert gate(model.path, model.path).relative == 0
    changed = onnx.load(model.path)
    for tensor in changed.graph.initializer:
        if tuple(tensor.dims) == (64, 96) or tuple(tensor.dims) == (96, 64):
            tensor.CopyFrom(numpy_helper.from_array(1.01 * numpy_helper.to_array(tensor), tensor.name))
            break
    else:
        pytest.fail("no FFN weight found")
    onnx.save(changed, tmp_path / "changed.onnx")
    assert 1e-6 < gate(model.path, tmp_path / "changed.onnx").relative < 0.1
    assert StepClock(model, [cpu_library()], seconds=0.05)(model.path, model.path).before > 0
