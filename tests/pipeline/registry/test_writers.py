"""Transfers that are broken off go on; writers and the collector work beside each other, on stores that allow it."""

import json
import os
import shutil
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from engines.bundle import file_records, open_bundle, write_bundle
from engines.manifest import Manifest
from pipeline.registry import Registry, RegistryError, Store
from pipeline.registry.access import LEASES, LOCK
from pipeline.registry.collect import CollectConfig, collect
from pipeline.registry.keys import create_key, trusted_keys_from_file
from pipeline.registry.pull import pull
from pipeline.registry.records import chunk_key, release_key
from tests.pipeline.registry.registry_material import assert_sound, make_bundle, place, publish_many


class Flaky(Store):
    """A store whose connection breaks after so many transfers."""

    left = 10**6

    def read(self, key: str) -> bytes | None:
        return self._counted(key, super().read(key))

    def put(self, key: str, data: bytes) -> None:
        super().put(key, self._counted(key, data))

    def _counted(self, key, value):
        if key.startswith("chunks/"):
            self.left -= 1
            if self.left < 0:
                raise RegistryError("the connection broke")
        return value


def test_transfers_go_on_where_they_were_broken_off(url, keys, tmp_path):
    store = Flaky(url)
    registry = Registry(store, keys[1], keys[0], chunk_bytes=100)
    bundle = make_bundle(tmp_path / "bundle")
    (tmp_path / "bundle" / "engine.onnx").write_bytes(os.urandom(2500))
    write_again(bundle.path)
    sent = received = 0
    while True:
        store.left, before = 3, len(store.keys("chunks"))
        try:
            release = registry.publish(bundle.path)
            break
        except RegistryError:
            assert len(store.keys("chunks")) > before
            assert registry.versions("tiny", "cpu-avx2") == []
            sent += 1
    assert sent > 5
    while True:
        store.left = 3
        try:
            pull(registry, *place(release), tmp_path / "out", "candidate")
            break
        except RegistryError:
            assert not (tmp_path / "out").exists()
            received += 1
    assert received > 5
    assert open_bundle(tmp_path / "out").sha256 == release.bundle
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".out")]


def write_again(path: Path) -> None:
    manifest = open_manifest(path)
    files = {name: r for name, r in file_records(path).items() if not name.startswith("manifest.")}
    kept = path.with_name("kept")
    shutil.copytree(path, kept)

    def fill(folder: Path) -> Manifest:
        for name in files:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(kept / name, folder / name)
        return manifest.model_copy(update={"files": files})

    write_bundle(path, fill)


def open_manifest(path: Path) -> Manifest:
    return Manifest.model_validate_json((path / "manifest.json").read_bytes())


def test_a_half_downloaded_file_that_changed_is_downloaded_again(registry, publish, tmp_path):
    release = publish()
    partial = tmp_path / f".out.pull-{release.bundle[:16]}"
    partial.mkdir()
    (partial / "engine.onnx").write_bytes(b"a" * 1000 + b"x" * 700)
    pull(registry, *place(release), tmp_path / "out", "candidate")
    assert open_bundle(tmp_path / "out").sha256 == release.bundle


# Together


def test_processes_publish_into_one_store(shared_url, tmp_path):
    create_key(tmp_path / "k.pem")
    root = str(Path(__file__).parents[3])
    program = f"""
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.pipeline.registry.registry_material import publish_many
publish_many({shared_url!r}, Path({str(tmp_path)!r}) / "k.pem", Path({str(tmp_path)!r}), sys.argv[1], 4)
"""
    writers = [subprocess.Popen([sys.executable, "-c", program, f"w{number}"]) for number in range(3)]
    for writer in writers:
        assert writer.wait(120) == 0
    assert_sound(Registry(Store(shared_url), trusted_keys_from_file(tmp_path / "k.pem.pub"), None), 12)


def test_threads_publish_into_one_memory(tmp_path):
    create_key(tmp_path / "k.pem")
    url, failures = f"memory://{uuid.uuid4().hex}", []

    def work(name: str) -> None:
        try:
            publish_many(url, tmp_path / "k.pem", tmp_path, name, 5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"w{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert_sound(Registry(Store(url), trusted_keys_from_file(tmp_path / "k.pem.pub"), None), 20)


# Garbage


def test_only_what_nobody_needs_is_collected(registry, publish, tmp_path):
    releases = [publish(bytes([65 + number])) for number in range(6)]
    at = place(releases[0])
    for version in (1, 2, 3):
        registry.promote(*at, "canary", version)
    registry.promote(*at, "stable", 1)
    registry.store.put(chunk_key("f" * 64), b"left by a writer that died")
    registry.store.put("attestations/tiny/cpu-avx2/00000099/00000001", b"of a release that is gone")
    before = registry.store.keys("")
    planned = collect(registry, CollectConfig(keep=1, dry_run=True))
    assert registry.store.keys("") == before
    assert planned == collect(registry, CollectConfig(keep=1))
    assert planned.releases == ("tiny cpu-avx2 4",)  # candidate, canary and stable have 6, 3, 1, and had 5, 2
    assert registry.versions(*at) == [1, 2, 3, 5, 6]
    for version in registry.versions(*at):
        pull(registry, *at, tmp_path / str(version), version=version)
    assert registry.store.read(chunk_key("f" * 64)) is None
    assert registry.store.keys("attestations/tiny/cpu-avx2/00000099") == []
    assert collect(registry, CollectConfig(keep=1)).objects == 0
    assert registry.rollback(*at, "canary").version == 2


def test_nothing_is_collected_beside_a_writer_nor_written_beside_a_collector(registry, publish, url, keys):
    publish()
    other = Registry(Store(url), keys[1], keys[0])
    with other.access.lease():
        with pytest.raises(RegistryError, match="is being written by"):
            collect(registry, CollectConfig(keep=1))
        assert registry.store.read(LOCK) is None
        assert collect(registry, CollectConfig(keep=1, grace=0)).objects == 0, "its lease counts as dead"
        with pytest.raises(RegistryError, match="longer than a lease may last"):
            other.access.require_lease()
    registry.store.create(LOCK, b'{"created": 0, "owner": "somebody"}')
    with pytest.raises(RegistryError, match="being collected by somebody"), other.access.lease(wait=0):
        pytest.fail("it did not wait")
    assert registry.store.keys(LEASES) == []
    with pytest.raises(RegistryError, match="--break-lock"):
        collect(registry, CollectConfig())
    collect(registry, CollectConfig(break_lock=True))
    assert registry.store.read(LOCK) is None


def test_nothing_is_collected_from_a_registry_with_a_changed_record(registry, publish):
    release = publish()
    key = release_key(*place(release), 1)
    registry.store.put(key, registry.store.read(key)[:-1])
    before = len(registry.store.keys("chunks"))
    with pytest.raises(RegistryError, match="valid signature"):
        collect(registry, CollectConfig())
    assert len(registry.store.keys("chunks")) == before
    assert registry.store.read(LOCK) is None


# Stores


class UnknownFileSystem(MemoryFileSystem):
    protocol = "kilnunknown"


def test_what_cannot_tell_two_writers_apart_is_not_written(tmp_path):
    fsspec.register_implementation("kilnunknown", UnknownFileSystem, clobber=True)
    url = f"kilnunknown://{uuid.uuid4().hex}"
    for write in (Store(url).put, Store(url).create):
        with pytest.raises(RegistryError, match="--single-writer"):
            write("a", b"1")
    assert Store(url, single_writer=True).create("a", b"1")
    assert not Store(url, single_writer=True).create("a", b"2")
    assert Store(url).read("a") == b"1"
    with pytest.raises(RegistryError, match="s3fs"):
        Store("nothing-like-it://bucket/prefix")
    with pytest.raises(RegistryError, match="no registry"):
        Registry(Store(str(tmp_path / "none")), None).listing()


def test_a_store_of_another_format_is_left_alone(registry, publish):
    publish()
    registry.store.put("kiln-registry.json", json.dumps({"format": 2}).encode())
    for use in (registry.listing, lambda: publish(b"b")):
        with pytest.raises(RegistryError, match="format 2"):
            use()
