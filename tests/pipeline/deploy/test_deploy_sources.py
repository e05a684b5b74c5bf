"""Where nodes get bundles from, what versions must have in common, and what the command refuses before it connects."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from engines.bundle import EngineBundle, verify_bundle, write_bundle
from engines.manifest import Manifest, SkuRecord
from engines.server.options import EngineOptions
from pipeline.cli import kiln_group
from pipeline.deploy.bundles import FolderSource, ReleaseSource
from pipeline.deploy.options import Contract, DeployOptions, HttpOptions, ReplicaCount
from pipeline.deploy.update import judged_badly, require_alike
from pipeline.registry.keys import create_key, public_path, signing_key_from_pem, trusted_keys_from_file
from pipeline.registry.registry import Registry
from pipeline.registry.store import RegistryError, Store, UntrustedError
from plugins.errors import KilnError
from tests.manifests import manifest_of

SKU = "cpu-avx2"


def bundle_at(path: Path, engine: bytes = b"engine", tokenizer: bytes = b"words", sku: str = SKU) -> EngineBundle:
    """Whole, but for an engine that nothing could run."""

    def fill(folder: Path) -> Manifest:
        (folder / "engine.onnx").write_bytes(engine)
        (folder / "tokenizer").mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / "tokenizer" / name).write_bytes(tokenizer)
        return manifest_of(folder, "m", sku=SkuRecord(name=sku, arch="x86-64-v3"), tokenizer="tokenizer")

    return write_bundle(path, fill)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    create_key(tmp_path / "k.pem")
    trusted = trusted_keys_from_file(public_path(tmp_path / "k.pem"))
    return Registry(Store(str(tmp_path / "registry")), trusted, signing_key_from_pem(tmp_path / "k.pem"))


def released(registry: Registry, tmp_path: Path) -> ReleaseSource:
    registry.publish(bundle_at(tmp_path / "built").path)
    trust = public_path(tmp_path / "k.pem").read_bytes()
    return ReleaseSource.find(registry.store.url, trust, "m", SKU, 1, str(tmp_path / "node"))


def test_a_release_is_pulled_once_for_a_node_and_verified(registry, tmp_path):
    source = released(registry, tmp_path)
    path = source.bring()
    assert verify_bundle(path).sha256 == source.identity
    inode = path.stat().st_ino
    assert source.bring() == path
    assert path.stat().st_ino == inode
    (path / "engine.onnx").write_bytes(b"broken")
    assert verify_bundle(source.bring()).sha256 == source.identity


def test_a_tokenizer_comes_without_the_engine(registry, tmp_path):
    source = released(registry, tmp_path)
    folder = source.bring_tokenizer()
    assert folder is not None
    assert (folder / "tokenizer.json").read_bytes() == b"words"
    assert list((tmp_path / "node").rglob("engine.onnx")) == []
    assert source.bring_tokenizer() == folder


def test_a_release_signed_by_others_is_not_brought(registry, tmp_path):
    source = released(registry, tmp_path)
    create_key(tmp_path / "other.pem")
    with pytest.raises(UntrustedError, match="the trusted keys of the deployment does not list"):
        replace(source, trust=public_path(tmp_path / "other.pem").read_bytes()).bring()


def test_a_folder_that_was_rebuilt_is_another_bundle(tmp_path):
    source = FolderSource.open(bundle_at(tmp_path / "b").path)
    assert source.bring() == tmp_path / "b"
    bundle_at(tmp_path / "b", b"another engine")
    with pytest.raises(KilnError, match="it was rebuilt; deploy it again"):
        source.bring()


def test_versions_must_read_text_alike(tmp_path):
    first = FolderSource.open(bundle_at(tmp_path / "a").path)
    contract = Contract.of(first.manifest())
    deployed = DeployOptions("kiln", contract, EngineOptions(), ReplicaCount(1, 1), {}, HttpOptions("m"))
    require_alike(deployed, FolderSource.open(bundle_at(tmp_path / "b", b"new").path))
    words, machine = {"tokenizer": b"other words"}, {"sku": "cpu-avx512"}
    problems = [(words, "another tokenizer"), (machine, "for cpu-avx512, what serves for cpu-avx2")]
    for number, (changes, problem) in enumerate(problems):
        other = FolderSource.open(bundle_at(tmp_path / f"c{number}", **changes).path)
        with pytest.raises(KilnError, match=problem):
            require_alike(deployed, other)


def test_a_version_that_went_back_is_not_tried_again_unnoticed(registry, tmp_path):
    source = released(registry, tmp_path)
    judged_badly(source)
    registry.attest(registry.release("m", SKU, 1), False, {}, {"roll-out": "failed: it was slow"})
    with pytest.raises(
        RegistryError, match=r"failed its last judgement \(roll-out: failed: it was slow\); say --again"
    ):
        judged_badly(source)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["up", "{bundle}", "--host", "0.0.0.0"], "everybody who reaches 0.0.0.0"),
        (["up", "{bundle}", "--sku", SKU], "--sku and --trust are for a registry"),
        (["up", "m", "--registry", "{registry}"], "give --sku"),
        (["up", "m", "--registry", "{registry}", "--sku", SKU], "no trusted keys"),
        (["up", "m", "--registry", "{registry}", "--sku", SKU, "--allow-unsigned"], "has nothing in stable"),
        (["roll", "{bundle}", "--key", "{key}"], "--key signs in a registry"),
        (["roll", "{bundle}", "--latency", "-1"], "the limit of latency"),
        (["up", "no-such-folder"], "no-such-folder is not a folder"),
    ],
)
def test_what_the_command_refuses_before_it_connects(registry, tmp_path, arguments, problem):
    bundle_at(tmp_path / "bundle")
    places = {"bundle": tmp_path / "bundle", "registry": tmp_path / "registry", "key": tmp_path / "k.pem"}
    filled = [argument.format(**places) for argument in arguments]
    result = CliRunner().invoke(kiln_group, ["deploy", "ray", *filled])
    assert isinstance(result.exception, KilnError), result.output
    assert problem in str(result.exception)
