"""Nights: what is skipped, built, judged, promoted and held back, and what each gate catches."""

import pytest

pytest.importorskip("cryptography")
pytest.importorskip("onnxruntime")

from engines.sku import host_cpu_features
from pipeline.registry.records import chunk_key, release_key
from pipeline.registry.store import Store
from plugins.errors import KilnError
from tests.pipeline.nightly_material import SKU, cases, only, save_conv, save_embedding, save_mlp, text_of

pytestmark = pytest.mark.skipif(not {"avx2", "fma"} <= host_cpu_features(), reason="engines are built for AVX2")


def test_what_did_not_change_is_not_built(world, silent):
    made = world("mlp")
    first = only(made.night(silent))
    assert (first.status, first.version) == ("promoted", 1)
    assert cases(first) == {
        **{"build": "passed", "upload": "passed", "accuracy": "passed"},
        **{"determinism": "skipped", "speed": "skipped", "promote": "passed"},
    }
    content = made.content()
    again = only(made.night(silent))
    assert (again.status, again.version) == ("unchanged", 1)
    assert made.content() == content
    assert content[f"mlp {SKU} 1"][1] == ("candidate", "canary")
    assert f"mlp {SKU} stable" not in content, "that is for people"


@pytest.mark.parametrize("change", ["code", "model", "options", "force"])
def test_what_changed_is_built_again(world, silent, change):
    made = world("mlp")
    made.night(silent)
    if change == "model":
        save_mlp(made.models / "mlp.onnx", seed=1)
    elif change == "options":
        made.path.write_text(made.path.read_text() + 'build = { disable = ["fold_constants"] }\n')
    report = made.night(silent, "code-2" if change == "code" else "code-1", force=change == "force")
    assert only(report).version == 2


def test_a_rebuild_is_compared_with_stable_and_promoted(world, silent):
    made = world("mlp")
    made.night(silent)
    made.make_stable()
    job = only(made.night(silent, "code-2"))
    assert (job.status, job.version, job.stable) == ("promoted", 2, 1)
    assert set(cases(job).values()) == {"passed"}
    assert list(cases(job)) == ["build", "upload", "verify stable", "accuracy", "determinism", "speed", "promote"]
    assert "bit by bit" in text_of(job, "determinism")
    assert job.changes == {"code": "code-1 -> code-2"}
    assert "as they were when it was built" in text_of(job, "determinism")
    registry = made.registry()
    assert registry.channel("mlp", SKU, "stable").version == 1
    assert registry.channel("mlp", SKU, "canary").version == 2


# What gates catch


def test_a_poisoned_model_is_held_back_by_the_accuracy_gate(world, silent):
    """The graph is sound and the build's own check passes: only the comparison with stable shows it."""
    made = world("conv")
    made.night(silent)
    made.make_stable()
    save_conv(made.models / "conv.onnx", variance=4.0)
    report = made.night(silent)
    job = only(report)
    assert (job.status, report.exit_code) == ("held back", 3)
    assert cases(job)["build"] == "passed"
    assert cases(job)["accuracy"] == "failed"
    assert cases(job)["determinism"] == "skipped"
    registry = made.registry()
    assert {name: registry.channel("conv", SKU, name).version for name in ("candidate", "canary", "stable")} == {
        **{"candidate": 2, "canary": 1, "stable": 1}
    }
    again = made.night(silent)
    assert (only(again).status, again.exit_code) == ("held back", 3)
    assert "nothing changed since" in only(again).text
    with pytest.raises(KilnError, match="failed its last verification"):
        registry.promote("conv", SKU, "canary", 2)
    save_conv(made.models / "conv.onnx")
    assert only(made.night(silent)).status == "promoted"


def test_a_slower_engine_is_held_back_by_the_speed_gate(world, silent):
    made = world("embedding")
    made.night(silent)
    made.make_stable()
    save_embedding(made.models / "embedding.onnx", work=40)  # 190 times the work: other load hides less
    job = only(made.night(silent))
    assert job.status == "held back"
    assert cases(job)["accuracy"] == "passed"
    assert cases(job)["speed"] == "failed"
    assert "slower" in text_of(job, "speed")
    assert made.registry().channel("embedding", SKU, "canary").version == 1


class Truncating(Store):
    """Cuts off so many uploads of parts, for good or for once."""

    left = 0

    def put(self, key: str, data: bytes) -> None:
        if key.startswith("chunks/") and self.left > 0 and len(data) > 100:
            self.left -= 1
            data = data[:-1]
        super().put(key, data)


def test_a_truncated_upload_is_caught_by_the_upload_gate(world, silent):
    made = world("mlp")
    store = Truncating(str(made.folder / "registry"))
    store.left = 10**6
    report = made.night(silent, store=store)
    job = only(report)
    assert (job.status, report.exit_code) == ("failed", 4)
    assert cases(job) == {"build": "passed", "upload": "failed"}
    assert "publish the bundle again" in text_of(job, "upload")
    assert made.registry().pairs() == []
    store.left = 1
    job = only(made.night(silent, store=store))
    assert job.status == "promoted"
    assert "sent again" in text_of(job, "upload")
    assert made.content()[f"mlp {SKU} candidate"][1] == job.version


@pytest.mark.parametrize("channel", ["stable", "candidate"])
def test_a_tampered_signature_stops_the_job(world, silent, channel):
    made = world("mlp")
    made.night(silent)
    made.make_stable()
    made.night(silent, "code-2")
    registry = made.registry()
    key = release_key("mlp", SKU, 1 if channel == "stable" else 2)
    data = registry.store.read(key)
    registry.store.put(key, data[:-1] + b" }")
    report = made.night(silent, "code-3")
    job = only(report)
    assert (job.status, report.exit_code) == ("failed", 4)
    assert cases(job)["verify stable" if channel == "stable" else "registry"] == "error"
    assert "valid signature" in job.text
    assert registry.channel("mlp", SKU, "canary").version == 2
    assert registry.channel("mlp", SKU, "stable").version == 1


def test_a_damaged_stable_is_not_compared_with(world, silent):
    made = world("mlp")
    made.night(silent)
    made.make_stable()
    registry = made.registry()
    release = registry.release("mlp", SKU, 1)
    key = chunk_key(release.files["engine.onnx"].chunks[0])
    registry.store.put(key, registry.store.read(key)[:-1] + b"x")
    save_mlp(made.models / "mlp.onnx", seed=1)
    for path in (made.config.work / "jobs").rglob("engine.onnx"):
        path.unlink()
    job = only(made.night(silent))
    assert (job.status, cases(job)["verify stable"]) == ("failed", "error")
    assert "changed or damaged" in job.text


# Other machines


def test_what_cannot_be_executed_here_waits_for_a_machine_that_can(world, silent, monkeypatch):
    made = world("mlp", skus=("cpu-far", SKU))
    report = made.night(silent)
    assert [job.status for job in report.jobs] == ["unverified", "promoted"]
    assert report.exit_code == 0
    registry = made.registry()
    states = {item.release.sku: item.state for item in registry.listing()}
    assert states == {"cpu-far": "candidate, unverified", SKU: "candidate, canary, verified"}
    with pytest.raises(KilnError, match="kiln nightly verify"):
        registry.promote("mlp", "cpu-far", "canary")
    assert [job.status for job in made.nightly(silent).verify().jobs] == ["unverified", "unchanged"]

    features = host_cpu_features() | {"a-feature-of-other-machines"}
    monkeypatch.setattr("engines.bundle.host_cpu_features", lambda: features)
    capable = made.nightly(silent, machine=made.machine(more_features=("a-feature-of-other-machines",)))
    capable.journal.end()
    verified = capable.verify()
    assert [job.status for job in verified.jobs] == ["promoted", "unchanged"]
    assert registry.channel("mlp", "cpu-far", "canary").version == 1
