"""Nightly rebuilds whose tasks run on the nodes of a real Ray cluster."""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pipeline.nightly import ray_executor
from pipeline.nightly.executor import Limits, Task
from pipeline.nightly.ray_executor import RayExecutor, bring, describe
from pipeline.registry.store import Store
from pipeline.registry.transfer import CHUNK_BYTES, upload
from plugins.errors import KilnError
from tests.pipeline.deploy.cluster_material import ray_cluster, wait_until
from tests.pipeline.nightly_material import SKU, World


def test_files_travel_through_the_store_and_nothing_else_stays(tmp_path: Path):
    here, there, store = tmp_path / "here", tmp_path / "there", Store(str(tmp_path / "store"))
    for name, text in (
        ("candidate/engine.onnx", "new"),
        ("candidate/a/b", "x" * 1000),
        ("outputs.npz", ""),
        ("log", "l"),
    ):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    (there / "candidate").mkdir(parents=True)
    (there / "candidate" / "left-over").write_text("of an earlier night")
    (there / "stable").mkdir()
    (there / "stable" / "kept").write_text("of this one")
    names = ("candidate", "outputs.npz", "stable-outputs.npz")
    files = describe(here, names)
    upload(store, here, files, CHUNK_BYTES, lambda _: None)
    bring(store, there, files, names)
    found = {path.relative_to(there).as_posix(): path.read_text() for path in there.rglob("*") if path.is_file()}
    assert found == {
        "candidate/engine.onnx": "new",
        "candidate/a/b": "x" * 1000,
        "outputs.npz": "",
        "stable/kept": "of this one",
    }


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "world", ("mlp",), (SKU,))


@pytest.fixture(scope="module")
def labelled_cluster(request: pytest.FixtureRequest):
    if "cluster" not in request.config.getoption("-m"):
        pytest.skip("opt-in: -m cluster")
    pytest.importorskip("ray")
    with ray_cluster(1, SKU) as made:
        yield made


def executor_for(world: World, *skus: str) -> RayExecutor:
    return RayExecutor(world.config.registry, False, skus or (SKU,), "test", str(world.folder / "node"))


@pytest.mark.cluster
def test_a_night_on_the_cluster_promotes_what_one_here_would(labelled_cluster, world, silent):
    executor = executor_for(world)
    (job,) = world.night(silent, executor=executor, machines=executor.machine).jobs
    assert job.status == "promoted", job
    assert {case.name: case.status for case in job.cases} == {
        "build": "passed",
        "upload": "passed",
        "accuracy": "passed",
        "determinism": "skipped",
        "speed": "skipped",
        "promote": "passed",
    }
    assert (world.folder / "node" / "test" / f"mlp-{SKU}" / "candidate" / "engine.onnx").is_file()
    world.make_stable()
    (again,) = world.night(silent, executor=executor, machines=executor.machine, force=True).jobs
    assert again.status == "promoted", again
    assert {case.name for case in again.cases} >= {"determinism", "speed"}
    assert world.registry().store.keys("leases") == []


@pytest.mark.cluster
def test_a_machine_type_that_no_node_has_is_named(labelled_cluster, world, silent):
    world.path.write_text(world.path.read_text().replace(f"skus = ['{SKU}']", "skus = ['cpu-far']"))
    executor = executor_for(world, "cpu-far")
    (job,) = world.night(silent, executor=executor, machines=executor.machine).jobs
    assert job.status == "failed"
    assert f"no node of the Ray cluster has the resource sku:cpu-far; its 2 nodes have sku:{SKU}" in job.text


@pytest.mark.cluster
def test_a_worker_that_dies_is_a_crash_that_is_tried_again(labelled_cluster, world, silent):
    """The task's worker is killed once: its child dies with it, and the second attempt succeeds."""
    executor = executor_for(world)
    world.config.work.mkdir(parents=True)
    killer = threading.Thread(target=kill_first_child)
    killer.start()
    config = world.config.model_copy(update={"retries": 2})
    nightly = replace(world.nightly(silent), config=config, executor=executor, machines=executor.machine)
    (job,) = nightly.rebuild().jobs
    killer.join()
    assert job.status == "promoted", job


def wait_for_ever() -> None:
    threading.Event().wait()


def kill_first_child() -> None:
    def child() -> psutil.Process | None:
        for process in psutil.process_iter(["cmdline"]):
            if "pipeline.nightly.child" in (process.info["cmdline"] or []):
                return process
        return None

    found = wait_until(child, "a task's child")
    worker = found.parent()
    assert "ray::" in worker.cmdline()[0], worker.cmdline()
    os.kill(worker.pid, signal.SIGKILL)
    found.wait(30)


@pytest.mark.cluster
def test_a_task_that_waits_for_a_node_that_is_gone_ends(labelled_cluster, world):
    ray = pytest.importorskip("ray")
    node = labelled_cluster.add_node(num_cpus=1, resources={"sku:cpu-far": 1}, object_store_memory=100 << 20)
    executor = executor_for(world, "cpu-far")
    held = ray.remote(num_cpus=0, resources={"sku:cpu-far": 1})(wait_for_ever).remote()
    outcomes = []
    task = Task("build", world.folder / "job", "cpu-far", {})
    waiting = threading.Thread(target=lambda: outcomes.append(executor.run(task, Limits(600, None), lambda _: None)))
    waiting.start()
    labelled_cluster.remove_node(node, allow_graceful=False)
    waiting.join(120)
    assert not waiting.is_alive()
    assert outcomes[0].status == "crashed"
    assert (
        "no node of the Ray cluster has the resource sku:cpu-far" in outcomes[0].message
        or "lost" in outcomes[0].message
    )
    del held


@pytest.mark.cluster
def test_a_node_with_other_sources_is_refused(labelled_cluster, world, monkeypatch):
    executor = executor_for(world)
    monkeypatch.setattr(ray_executor, "code_digest", lambda: "0" * 64)
    with pytest.raises(KilnError, match="has other sources of Kiln"):
        executor.machine(SKU)
