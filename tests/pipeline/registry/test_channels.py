"""What comes out is what was put in; channels move as they should, and the command line does both."""

import base64
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from engines.bundle import open_bundle
from pipeline.cli_registry import registry_group
from pipeline.registry import RegistryError, Store
from pipeline.registry.pull import pull
from plugins.errors import KilnError
from tests.pipeline.registry.registry_material import make_bundle, place


def test_what_is_pulled_is_what_was_published(registry, publish, tmp_path):
    release = publish()
    assert (release.version, registry.channel(*place(release), "candidate").version) == (1, 1)
    pulled = pull(registry, *place(release), tmp_path / "out", "candidate")
    assert pulled == release
    source, copy = open_bundle(tmp_path / "made" / b"a".hex()), open_bundle(tmp_path / "out")
    assert source.sha256 == copy.sha256 == release.bundle
    assert (copy.path / "tokenizer" / "empty.txt").read_bytes() == b""
    assert sorted(os.listdir(tmp_path)) == ["made", "out", "out.release.json", *(["registry"] * registry.store._local)]


def test_equal_parts_are_stored_once_and_equal_bundles_published_once(registry, publish):
    first = publish()
    assert publish() == first
    chunks = registry.store.keys("chunks")
    assert len(chunks) == len(set(chunks)) == len(first.chunks)
    assert sum(len(file.chunks) for file in first.files.values()) > len(chunks)  # the engine repeats itself
    assert registry.versions(*place(first)) == [1]


def test_a_release_moves_through_the_channels_and_back(registry, publish):
    first, second = publish(b"a"), publish(b"b")
    at = place(first)
    assert second.version == 2
    with pytest.raises(RegistryError, match="never in canary"):
        registry.promote(*at, "stable", 2)
    for version in (1, 2):
        registry.promote(*at, "canary", version)
        assert registry.promote(*at, "stable").version == version
    assert registry.promote(*at, "stable").number == 2, "a second time it is where it should be"
    with pytest.raises(RegistryError, match="1 is lower"):
        registry.promote(*at, "stable", 1)
    assert registry.rollback(*at).version == 1
    with pytest.raises(RegistryError, match="no earlier version"):
        registry.rollback(*at)
    states = {item.release.version: item.state for item in registry.listing()}
    assert states == {1: "stable, verified", 2: "candidate, canary, verified"}


@pytest.mark.parametrize("passed", [None, False])
def test_what_no_gate_passed_is_not_promoted(registry, publish, passed):
    release = publish(passed=passed)
    with pytest.raises(RegistryError, match="not been verified" if passed is None else "failed its last"):
        registry.promote(*place(release), "canary")
    assert registry.channel(*place(release), "canary") is None
    assert registry.promote(*place(release), "canary", allow_unverified=True).version == 1


def test_a_bundle_for_another_machine_is_kept_and_passed_on(registry, tmp_path):
    bundle = make_bundle(tmp_path / "other", sku="cpu-future", features=("avx9000",))
    with pytest.raises(KilnError, match="avx9000"):
        open_bundle(bundle.path)
    release = registry.publish(bundle.path)
    assert [item.state for item in registry.listing()] == ["candidate, unverified"]
    pull(registry, *place(release), tmp_path / "copy", "candidate")
    assert (tmp_path / "copy" / "manifest.sha256").read_text().strip() == bundle.sha256


def test_versions_go_up(registry, publish):
    publish(b"a", version=7)
    assert publish(b"b").version == 8
    with pytest.raises(RegistryError, match="lower than 8"):
        publish(b"c", version=3)
    with pytest.raises(RegistryError, match="versions never change"):
        publish(b"c", version=8)
    assert publish(b"d", version=3, allow_downgrade=True).version == 3
    assert registry.channel("tiny", "cpu-avx2", "candidate").version == 3


# Command line


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., str]]:
    def run(*arguments: str, code: int = 0, error: str | None = None) -> str:
        result = CliRunner().invoke(registry_group, list(map(str, arguments)))
        if error is not None:
            assert error in f"{result.exception} {result.output}"
            return ""
        assert result.exit_code == code, (result.output, result.exception)
        return result.stdout

    return run


def test_the_command_line(command, shared_url, tmp_path):
    url = shared_url
    toml = command("key", tmp_path / "signer.pem").partition("\n\n")[2]
    (tmp_path / "trusted.toml").write_text(toml)
    base64.b64decode(toml.split('"')[1])
    sign = ("--key", tmp_path / "signer.pem", "--trust", tmp_path / "trusted.toml")
    read = ("--trust", tmp_path / "trusted.toml")
    first = make_bundle(tmp_path / "a", b"a")
    make_bundle(tmp_path / "b", b"b")
    command("publish", url, first.path, error="--trust FILE")
    command("publish", url, first.path, *read, error="--key FILE")
    assert command("publish", url, first.path, *sign) == "tiny cpu-avx2 1\n"
    command("promote", url, "tiny", "cpu-avx2", "--to", "canary", *sign, error="kiln nightly verify")
    command("promote", url, "tiny", "cpu-avx2", "--to", "canary", "--allow-unverified", *sign)
    assert "version 1, move 1" in command(
        "promote", url, "tiny", "cpu-avx2", "--to", "stable", "--allow-unverified", *sign
    )
    command("publish", url, tmp_path / "b", *sign)
    for channel in ("canary", "stable"):
        command("promote", url, "tiny", "cpu-avx2", "--to", channel, "--allow-unverified", *sign)
    assert "version 1, move 3" in command("rollback", url, "tiny", "cpu-avx2", *sign)
    listed = json.loads(command("list", url, "--json", *read))
    assert [(item["version"], item["channels"]) for item in listed] == [(1, ["stable"]), (2, ["candidate", "canary"])]
    assert "unverified" in command("list", url, *read)
    command("pull", url, "tiny", "cpu-avx2", "--out", tmp_path / "out", *read)
    assert open_bundle(tmp_path / "out").sha256 == first.sha256
    assert command("verify", url, *read) == ""
    store = Store(url)
    key = next(key for key in store.keys("chunks") if store.size(key) == 2500)
    store.put(key, b"a")
    assert "the upload was cut off" in command("verify", url, *read, code=1)
    command("gc", url, "--dry-run", *sign)
