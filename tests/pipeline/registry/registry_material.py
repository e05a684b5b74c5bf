"""Tiny bundles, and writers that publish many of them at once."""

import itertools
from contextlib import suppress
from pathlib import Path

from engines.bundle import EngineBundle, write_bundle
from engines.manifest import Manifest, SkuRecord
from pipeline.registry import Registry, RegistryError, Release, Store
from pipeline.registry.access import LEASES
from pipeline.registry.keys import public_path, signing_key_from_pem, trusted_keys_from_file
from tests.manifests import manifest_of

CHUNK = 1000
MACHINE = {"cpu": "a machine"}


def make_bundle(path: Path, mark: bytes = b"a", sku: str = "cpu-avx2", features: tuple[str, ...] = ()) -> EngineBundle:
    def fill(folder: Path) -> Manifest:
        (folder / "engine.onnx").write_bytes(mark * 2500)
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "tokenizer_config.json").write_bytes(b"{}")
        (folder / "tokenizer" / "empty.txt").write_bytes(b"")
        machine = SkuRecord(name=sku, arch="x86-64-v3", cpu_features=features)
        return manifest_of(folder, "tiny", sku=machine, tokenizer="tokenizer")

    return write_bundle(path, fill)


def place(release: Release) -> tuple[str, str]:
    return release.model, release.sku


def publish_many(url: str, key_path: Path, folder: Path, name: str, count: int) -> None:
    key, trusted = signing_key_from_pem(key_path), trusted_keys_from_file(public_path(key_path))
    registry = Registry(Store(url), trusted, key, chunk_bytes=CHUNK)
    for number in range(count):
        bundle = make_bundle(folder / name, f"{name}{number}".encode())
        release = registry.publish(bundle.path)
        registry.attest(release, True, MACHINE, {})
        with suppress(RegistryError):  # another's was faster, and higher
            registry.promote(*place(release), "canary", release.version)


def assert_sound(registry: Registry, count: int) -> None:
    versions = registry.versions("tiny", "cpu-avx2")
    assert versions == list(range(1, count + 1))
    releases = [registry.release("tiny", "cpu-avx2", version) for version in versions]
    assert len({release.bundle for release in releases}) == count
    assert not any(registry.check(release) for release in releases)
    for channel in ("candidate", "canary"):
        head = registry.channel("tiny", "cpu-avx2", channel)
        entries = [registry.entry("tiny", "cpu-avx2", channel, number) for number in range(1, head.number + 1)]
        moved = [entry.version for entry in entries]
        assert moved == sorted(moved)
        assert all(b.previous[-1] == a.version for a, b in itertools.pairwise(entries))
    assert registry.channel("tiny", "cpu-avx2", "canary").version == count
    assert registry.store.keys(LEASES) == []
