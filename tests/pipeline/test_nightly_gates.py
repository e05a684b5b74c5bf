"""The speed and determinism gates: their statistics, and rebuilds that compute something else."""

import numpy as np
import pytest

pytest.importorskip("cryptography")
pytest.importorskip("onnxruntime")

from engines.sku import host_cpu_features
from pipeline.nightly.config import SpeedOptions
from pipeline.nightly.determinism import distances, same
from pipeline.nightly.determinism import verdict as determinism_verdict
from pipeline.nightly.speed import measure
from pipeline.nightly.speed import verdict as speed_verdict
from plugins.errors import KilnError
from tests.pipeline.nightly_material import SKU, cases, only, text_of

pytestmark = pytest.mark.skipif(not {"avx2", "fma"} <= host_cpu_features(), reason="engines are built for AVX2")


@pytest.mark.parametrize(("slowdown", "noise", "passed"), [(1.0, 0.3, True), (1.3, 0.02, False), (1.3, 1.0, True)])
def test_only_what_is_shown_to_be_slower_fails(slowdown, noise, passed):
    random = np.random.default_rng(11)
    options = SpeedOptions(limit=0.05)
    interval = measure(
        lambda side: (slowdown if side else 1.0) * float(np.exp(random.normal(0, noise))), options, lambda n: None
    )
    found = speed_verdict(interval, options)
    assert found["passed"] is passed
    assert interval.pairs == (options.most_pairs if noise == 1.0 and interval.median > 1.05 else interval.pairs)
    assert found["text"].startswith("slower") is not passed


def test_more_pairs_are_measured_where_few_do_not_decide():
    ratios = iter([1.2] * 6 + [0.9] * 4 + [1.2] * 40)
    options = SpeedOptions(limit=0.05, pairs=10, most_pairs=40)
    interval = measure(lambda side: next(ratios) if side else 1.0, options, lambda n: None)
    assert interval.pairs == 40
    assert interval.lowest > 1.05


def test_differences_are_within_chance_or_beyond():
    assert determinism_verdict(1e-7, [1e-7, 3e-7], 2)["passed"]
    beyond = determinism_verdict(1e-3, [1e-7, 3e-7], 2)
    assert not beyond["passed"]
    assert "beyond chance" in beyond["text"]
    assert not determinism_verdict(1e-9, [0.0], 2)["passed"], "rebuilds that never differ allow nothing"


def test_distances_see_numbers_that_are_none_and_other_shapes():
    a = [{"y": np.array([1.0, np.nan, np.inf], np.float32)}]
    assert same(a, a)
    assert distances(a, a) == [0.0]
    for other in ([1.0, 2.0, np.inf], [1.0, np.nan, -np.inf]):
        b = [{"y": np.array(other, np.float32)}]
        assert not same(a, b)
        assert distances(a, b) == [np.inf]
    with pytest.raises(KilnError, match="another shape"):
        distances([{"y": np.zeros(2)}], [{"y": np.zeros(3)}])


def test_a_rebuild_that_computes_something_else_is_beyond_chance(world, silent, monkeypatch):
    """The same inputs by their digests, another engine: as if a library's update had changed results."""
    made = world("mlp")
    made.night(silent)
    made.make_stable()
    digest = only(made.night(silent)).version and made.registry().release("mlp", SKU, 1).inputs["model"]
    import onnx
    from onnx import numpy_helper

    path = made.models / "mlp.onnx"
    model = onnx.load(path)
    weight = numpy_helper.to_array(model.graph.initializer[0])
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array((weight * (1 + 1e-5)).astype(np.float32), "a"))
    onnx.save(model, path)
    monkeypatch.setattr("pipeline.source.ModelSource.sha256", digest)
    job = only(made.night(silent, "code-2"))
    assert job.status == "held back"
    assert cases(job) | {"determinism": "failed", "accuracy": "passed"} == cases(job)
    assert "beyond chance" in text_of(job, "determinism")


def test_an_update_that_changes_what_the_same_engine_computes_is_seen(world, silent, monkeypatch):
    """Both engines run with the new library and agree; what stable computed when it was built does not."""
    from pipeline.nightly import determinism

    made = world("mlp")
    made.night(silent)
    made.make_stable()
    run = determinism._run
    monkeypatch.setattr(
        determinism,
        "_run",
        lambda *arguments: [{name: value * 1.001 for name, value in one.items()} for one in run(*arguments)],
    )
    job = only(made.night(silent, "code-2"))
    assert (job.status, cases(job)["determinism"]) == ("held back", "failed")
    assert "as they were when it was built" in text_of(job, "determinism")
    options = made.config.determinism.model_copy(update={"seed": 7})
    folder = made.config.work / "jobs" / f"mlp-{SKU}"
    assert determinism._read_outputs(folder / "stable-outputs.npz", options) is None, "those of other inputs"
