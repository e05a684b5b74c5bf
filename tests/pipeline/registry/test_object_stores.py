"""What object stores do that a folder does not: answers that are lost, puts that collide, conditions that are ignored.

With -m stores all tests of the registry run on servers of the protocols of S3, Google Cloud Storage and Azure, too.
"""

import uuid

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipeline.registry import Registry, RegistryError, Store, store
from pipeline.registry.collect import CollectConfig, collect
from pipeline.registry.records import CHANNELS
from tests.pipeline.registry.registry_material import MACHINE, make_bundle, place
from tests.pipeline.registry.store_servers import BUCKET, forgetful_gs_server


def test_a_put_whose_answer_was_lost_is_not_done_twice(registry, publish, monkeypatch):
    """The package's next try is refused then, by our own record."""
    at = place(publish(b"a"))
    create, lost = Store._create, []

    def unheard(self: Store, key: str, data: bytes) -> None:
        create(self, key, data)
        lost.append(key)
        raise FileExistsError(key)

    monkeypatch.setattr(Store, "_create", unheard)
    for mark in (b"b", b"c"):
        publish(mark)
    for version in (1, 2, 3):
        registry.promote(*at, "canary", version)
    assert registry.rollback(*at, "canary").version == 2
    assert registry.versions(*at) == [1, 2, 3]
    assert registry.channel(*at, "canary").number == 4
    assert [registry.attestation(*at, version).number for version in (1, 2, 3)] == [1, 1, 1]
    assert collect(registry, CollectConfig(keep=1)).releases == ()
    assert len(lost) == 11  # two releases, their moves of candidate and judgements; four moves of canary; a lock


def test_puts_that_collide_are_tried_again(monkeypatch):
    """As s3fs tells of S3's answer 409."""
    left, waits = [3], []

    def collides(self: Store, key: str, data: bytes) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(5, "An error occurred (ConditionalRequestConflict) when calling the PutObject operation")

    monkeypatch.setattr(Store, "_create", collides)
    monkeypatch.setattr(store.time, "sleep", waits.append)
    made = Store(f"memory://{uuid.uuid4().hex}")
    assert made.create("a", b"1")
    assert len(waits) == 3
    left[0] = 10**6
    with pytest.raises(RegistryError, match="ConditionalRequestConflict"):
        made.create("a", b"1")
    assert len(waits) == 10
    assert sum(waits) < 20


class ForgetfulFileSystem(MemoryFileSystem):
    """Speaks a protocol whose package passes the condition on, to a store that ignores it."""

    protocol = ("kilnforgetful", "s3")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options) -> None:
        super().pipe_file(path, value, mode="overwrite", **options)


def test_a_store_that_ignores_the_condition_is_written_by_a_single_writer_only(keys, tmp_path):
    fsspec.register_implementation("kilnforgetful", ForgetfulFileSystem, clobber=True)
    _refuses_several_writers(f"kilnforgetful://{uuid.uuid4().hex}", keys, tmp_path)


@pytest.mark.stores
def test_an_emulator_that_ignores_the_condition(request, keys, tmp_path):
    if "stores" not in request.config.getoption("-m"):
        pytest.skip("opt-in: -m stores")
    with forgetful_gs_server():
        _refuses_several_writers(f"gs://{BUCKET}/{uuid.uuid4().hex}", keys, tmp_path)


def _refuses_several_writers(url, keys, tmp_path):
    bundle = make_bundle(tmp_path / "bundle")
    registry = Registry(Store(url), keys[1], keys[0])
    with pytest.raises(RegistryError, match="--single-writer"):
        registry.publish(bundle.path)
    assert registry.store.keys("releases") == registry.store.keys("chunks") == []
    with pytest.raises(RegistryError, match="--single-writer"):
        collect(registry, CollectConfig())
    alone = Registry(Store(url, single_writer=True), keys[1], keys[0])
    release = alone.publish(bundle.path)
    assert registry.check(release) == []
    assert collect(alone, CollectConfig()).objects == 0


@pytest.mark.stores
def test_the_answers_of_s3_that_are_no_answers(request, servers, keys, tmp_path):
    if "stores" not in request.config.getoption("-m"):
        pytest.skip("opt-in: -m stores")
    server = servers.get("s3")
    registry = Registry(Store(f"s3://{BUCKET}/{uuid.uuid4().hex}"), keys[1], keys[0])
    for mark in (b"a", b"b", b"c"):
        release = registry.publish(make_bundle(tmp_path / mark.hex(), mark).path)
        registry.attest(release, True, MACHINE, {})
        registry.promote(*place(release), "canary")
    for fault in ("lost", "collision"):
        before = registry.channel(*place(release), "canary")
        server.faults.append(fault)
        after = registry.rollback(*place(release), "canary")
        assert server.met[-1] == fault
        assert (after.number, after.version) == (before.number + 1, before.version - 1)
    assert [registry.channel(*place(release), channel) is None for channel in CHANNELS] == [False, False, True]
