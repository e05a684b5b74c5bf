"""The registry: what comes out is what was signed and put in, and nothing else; channels move as they should."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem

pytest.importorskip("cryptography")

from engines.bundle import EngineBundle, file_records, open_bundle, write_bundle
from engines.manifest import BackendRecord, Manifest, ModelRecord, SkuRecord
from pipeline.cli_registry import registry_group
from pipeline.registry import Registry, RegistryError, Release, SigningKey, Store, TrustedKeys
from pipeline.registry.access import LEASES, LOCK
from pipeline.registry.collect import CollectConfig, collect
from pipeline.registry.keys import create_key, public_path, signing_key_from_pem, trusted_keys_from_file
from pipeline.registry.pull import pull
from pipeline.registry.records import chunk_key, release_key
from plugins.errors import KilnError

CHUNK = 1000
MACHINE = {"cpu": "a machine"}


def make_bundle(path: Path, mark: bytes = b"a", sku: str = "cpu-avx2", features: tuple[str, ...] = ()) -> EngineBundle:
    def fill(folder: Path) -> Manifest:
        (folder / "engine.onnx").write_bytes(mark * 2500)
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "tokenizer_config.json").write_bytes(b"{}")
        (folder / "tokenizer" / "empty.txt").write_bytes(b"")
        return Manifest(
            kiln_version="0",
            created="2026-01-01T00:00:00Z",
            name="tiny",
            model=ModelRecord(source="tiny", architecture="tiny", sha256="0" * 64, parameters=1),
            sku=SkuRecord(name=sku, arch="x86-64-v3", cpu_features=features),
            backend=BackendRecord(name="onnxruntime", version="1.31", provider="CPUExecutionProvider"),
            precision="fp32",
            tokenizer="tokenizer",
            inputs=(),
            outputs=(),
            files=file_records(folder),
        )

    return write_bundle(path, fill)


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[SigningKey, TrustedKeys]:
    path = tmp_path_factory.mktemp("keys") / "signer.pem"
    key = create_key(path)
    return key, trusted_keys_from_file(public_path(path))


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "registry") if request.param == "file" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def registry(url: str, keys: tuple[SigningKey, TrustedKeys]) -> Registry:
    return Registry(Store(url), keys[1], keys[0], chunk_bytes=CHUNK)


@pytest.fixture
def publish(registry: Registry, tmp_path: Path) -> Callable[..., Release]:
    def make(mark: bytes = b"a", passed: bool | None = True, **options) -> Release:
        bundle = make_bundle(tmp_path / "made" / mark.hex(), mark)
        release = registry.publish(bundle.path, **options)
        if passed is not None:
            registry.attest(release, passed, MACHINE, {"accuracy": "the same"})
        return release

    return make


def place(release: Release) -> tuple[str, str]:
    return release.model, release.sku


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


# What must not be used


def test_what_was_changed_is_refused_before_it_is_parsed(registry, publish, monkeypatch, tmp_path):
    release = publish()
    key = release_key(*place(release), 1)
    data = registry.store.read(key)
    monkeypatch.setattr(Release, "model_validate_json", lambda *_: pytest.fail("it was parsed"))
    for changed in (
        data.replace(b'"version":1', b'"version":9'),
        data[:-1],
        data + b" ",
        data.split(b"\n")[0] + b"\n\x00\xff no JSON at all",
    ):
        registry.store.put(key, changed)
        with pytest.raises(RegistryError, match="valid signature"):
            pull(registry, *place(release), tmp_path / "out", version=1)
    signature = data.split()[3]
    registry.store.put(key, data.replace(signature, signature[::-1]))
    with pytest.raises(RegistryError, match="valid signature"):
        pull(registry, *place(release), tmp_path / "out", version=1)
    registry.store.put(key, b"nonsense")
    with pytest.raises(RegistryError, match="does not begin"):
        pull(registry, *place(release), tmp_path / "out", version=1)
    assert not (tmp_path / "out").exists()


def test_a_record_stands_only_where_it_was_signed_for(registry, publish):
    first, second = publish(b"a"), publish(b"b")
    key = release_key(*place(first), 2)
    registry.store.put(key, registry.store.read(release_key(*place(first), 1)))
    with pytest.raises(RegistryError, match="valid signature"):
        registry.release(*place(second), 2)


def test_unsigned_and_foreign_releases_are_refused_unless_told(url, keys, tmp_path):
    bundle = make_bundle(tmp_path / "bundle")
    create_key(tmp_path / "stranger.pem")
    stranger = signing_key_from_pem(tmp_path / "stranger.pem")
    Registry(Store(url), None, stranger).publish(bundle.path, "foreign")
    Registry(Store(url), None, None).publish(bundle.path, "unsigned")
    careful, careless = Registry(Store(url), keys[1]), Registry(Store(url), None)
    for model, reason in (("foreign", "does not list"), ("unsigned", "is not signed")):
        with pytest.raises(RegistryError, match=reason):
            pull(careful, model, "cpu-avx2", tmp_path / model, "candidate")
        assert not (tmp_path / model).exists()
        pull(careless, model, "cpu-avx2", tmp_path / model, "candidate")
        assert open_bundle(tmp_path / model).sha256 == bundle.sha256


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-1], "the upload was cut off"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "changed or damaged"),
        (None, "is missing"),
    ],
)
def test_a_damaged_part_is_found_and_repaired(registry, publish, tmp_path, damage, reason):
    release = publish()
    pull(registry, *place(release), tmp_path / "out", "candidate")
    key = chunk_key(release.files["engine.onnx"].chunks[-1])
    whole = registry.store.read(key)
    if damage is None:
        registry.store.delete(key)
    else:
        registry.store.put(key, damage(whole))
    assert len(registry.check(release)) == 1
    assert reason in registry.check(release)[0]
    with pytest.raises(RegistryError, match=reason):
        pull(registry, *place(release), tmp_path / "second", "candidate")
    assert not (tmp_path / "second").exists()
    publish(repair=True)
    assert registry.check(release) == []
    pull(registry, *place(release), tmp_path / "second", "candidate")
    assert open_bundle(tmp_path / "second").sha256 == release.bundle


def test_a_key_moves_only_its_channels(url, tmp_path):
    key = create_key(tmp_path / "nightly.pem")
    trust = tmp_path / "trusted.toml"
    trust.write_text(f'[keys.nightly]\npublic = "{key.public_text}"\nchannels = ["candidate", "canary"]\n')
    registry = Registry(Store(url), trusted_keys_from_file(trust), key)
    release = registry.publish(make_bundle(tmp_path / "bundle").path)
    registry.attest(release, True, MACHINE, {})
    registry.promote(*place(release), "canary")
    registry.promote(*place(release), "stable")
    with pytest.raises(RegistryError, match="may move only candidate, canary"):
        pull(registry, *place(release), tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "lists no key"),
        ("[keys.a]\npublic = 'AAAA'", "no public key"),
        ("[keys.a]\npublic = '?'", "no base64"),
        ("[keys.a]\nsecret = 1", "keys.a.public"),
        ("[keys.a]\npublic = 'AA=='\nchannels = ['prod']", "keys.a.channels.0"),
        ("keys = [", "neither PEM nor TOML"),
        ("-----BEGIN NONSENSE-----\n", "no public key"),
    ],
)
def test_a_bad_list_of_keys_is_named(tmp_path, text, reason):
    path = tmp_path / "trusted"
    path.write_text(text)
    with pytest.raises(RegistryError, match=reason):
        trusted_keys_from_file(path)


def test_a_private_key_is_private(tmp_path):
    path = tmp_path / "k.pem"
    create_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(RegistryError, match="a key that is overwritten is lost"):
        create_key(path)
    path.chmod(0o644)
    with pytest.raises(RegistryError, match="chmod 600"):
        signing_key_from_pem(path)


# Older states


def test_a_lower_version_is_refused_unless_told(registry, publish, tmp_path):
    release, out = publish(b"a"), tmp_path / "out"
    publish(b"b")
    pull(registry, *place(release), out, version=2)
    with pytest.raises(RegistryError, match="has version 2; 1 is lower"):
        pull(registry, *place(release), out, version=1)
    assert (out / "engine.onnx").read_bytes()[:1] == b"b"
    assert pull(registry, *place(release), out, version=1, allow_downgrade=True) == release
    assert (out / "engine.onnx").read_bytes()[:1] == b"a"


def test_a_rollback_is_taken_and_an_old_state_is_not(registry, publish, tmp_path):
    release, out = publish(b"a"), tmp_path / "out"
    publish(b"b")
    publish(b"c")
    for version in (1, 2, 3):
        registry.promote(*place(release), "canary", version)
        registry.promote(*place(release), "stable", version)
    pull(registry, *place(release), out)
    newest = "channels/tiny/cpu-avx2/stable/00000003"
    data = registry.store.read(newest)
    registry.store.delete(newest)  # what somebody without a key can do
    with pytest.raises(RegistryError, match="put an old state back"):
        pull(registry, *place(release), out)
    registry.store.put(newest, data)
    registry.rollback(*place(release))
    registry.rollback(*place(release))
    assert pull(registry, *place(release), out).version == 1
    registry.promote(*place(release), "stable", 2)
    assert pull(registry, *place(release), out).version == 2


# Broken off


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


def test_processes_publish_into_one_folder(tmp_path):
    create_key(tmp_path / "k.pem")
    url, here = str(tmp_path / "registry"), str(Path(__file__).parent)
    program = f"""
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_registry import publish_many
publish_many({url!r}, Path({str(tmp_path)!r}) / "k.pem", Path({str(tmp_path)!r}), sys.argv[1], 4)
"""
    writers = [subprocess.Popen([sys.executable, "-c", program, f"w{number}"]) for number in range(3)]
    for writer in writers:
        assert writer.wait(120) == 0
    assert_sound(Registry(Store(url), trusted_keys_from_file(tmp_path / "k.pem.pub"), None), 12)


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


def test_the_command_line(command, tmp_path):
    url = tmp_path / "registry"
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
    store = Store(str(url))
    key = next(key for key in store.keys("chunks") if store.size(key) == 2500)
    store.put(key, b"a")
    assert "the upload was cut off" in command("verify", url, *read, code=1)
    command("gc", url, "--dry-run", *sign)
