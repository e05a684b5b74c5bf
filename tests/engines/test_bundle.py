"""Bundles: written in one step, and never opened unless every byte is as it was written."""

import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engines import bundle as module
from engines.bundle import IDENTITY, MANIFEST, BundleError, EngineBundle, file_records, open_bundle, write_bundle
from engines.manifest import BackendRecord, Manifest, ModelRecord, PluginRecord, SkuRecord
from engines.runtime.engine import Engine

FILES = {
    "engine.onnx": b"engine",
    "weights/engine.onnx.data": bytes(range(256)) * 20,
    "tokenizer/tokenizer_config.json": b"{}",
    "plugins/libkiln.so": b"\x7fELF library",
}


def fill(folder: Path, mark: bytes = b"", features: tuple[str, ...] = ()) -> Manifest:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content + mark)
    return Manifest(
        kiln_version="0",
        created="now",
        name=f"m{mark.decode()}",
        model=ModelRecord(source="m", architecture="A", sha256="0" * 64, parameters=1),
        sku=SkuRecord(name="cpu-avx2", arch="x", cpu_features=features),
        backend=BackendRecord(name="onnxruntime", version="1", provider="CPUExecutionProvider"),
        precision="fp32",
        tokenizer="tokenizer",
        inputs=(),
        outputs=(),
        plugins=(PluginRecord(file="plugins/libkiln.so", operator="kiln::X", abi_hash="0"),),
        files=file_records(folder),
    )


def make(path: Path, mark: bytes = b"", features: tuple[str, ...] = ()) -> EngineBundle:
    return write_bundle(path, lambda folder: fill(folder, mark, features))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make(tmp_path / "bundle").path


def edit_manifest(path: Path, edit: Callable[[dict], None]) -> None:
    """Change the manifest and sign it again, as a hostile or wrong builder would."""
    document = json.loads((path / MANIFEST).read_text())
    edit(document)
    text = json.dumps(document)
    (path / MANIFEST).write_text(text)
    (path / IDENTITY).write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")


def names_of(path: Path) -> list[str]:
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())


def flip(file: Path, position: int, mask: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= mask
    file.write_bytes(content)


def leftovers(parent: Path) -> list[str]:
    return [path.name for path in parent.iterdir() if ".kiln-" in path.name]


def test_round_trip(tmp_path):
    written = make(tmp_path / "deep" / "bundle")
    opened = open_bundle(written.path)
    assert opened == written
    assert opened.sha256 == hashlib.sha256((written.path / MANIFEST).read_bytes()).hexdigest()
    assert names_of(written.path) == sorted([*FILES, MANIFEST, IDENTITY])
    for name, content in FILES.items():
        assert (written.path / name).read_bytes() == content
        assert opened.manifest.files[name].bytes == len(content)
    assert opened.engine_path == written.path / "engine.onnx"
    assert opened.plugin_paths == [written.path / "plugins/libkiln.so"]
    assert opened.tokenizer_path == written.path / "tokenizer"
    assert leftovers(written.path.parent) == []


@pytest.mark.parametrize("name", [*FILES, MANIFEST, IDENTITY])
def test_one_flipped_byte_anywhere_is_refused_by_name(bundle, name):
    generator = random.Random(name)
    file = bundle / name
    original = file.read_bytes()
    positions = {0, len(original) - 1, *(generator.randrange(len(original)) for _ in range(20))}
    for position in positions:
        for mask in {1, 0x20, 0x80, generator.randrange(1, 256)}:
            flip(file, position, mask)
            with pytest.raises(BundleError, match=re.escape(name)):
                open_bundle(bundle)
            file.write_bytes(original)
    open_bundle(bundle)


def test_a_real_bundle_with_one_flipped_byte_is_not_loaded(tiny_llama_bundle, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_llama_bundle.path, copy)
    generator = random.Random(5)
    names = names_of(copy)
    assert len(names) >= 5
    for name in names:
        original = (copy / name).read_bytes()
        flip(copy / name, generator.randrange(len(original)), 1 << generator.randrange(8))
        with pytest.raises(BundleError, match=re.escape(name)):
            Engine.open(copy)
        (copy / name).write_bytes(original)
    Engine.open(copy).close()


@pytest.mark.parametrize("name", [*FILES, MANIFEST, IDENTITY])
def test_a_missing_or_cut_file_is_named(bundle, name):
    content = (bundle / name).read_bytes()
    for damaged in (b"", content[:-1], content + b"x"):
        (bundle / name).write_bytes(damaged)
        with pytest.raises(BundleError, match=re.escape(name)):
            open_bundle(bundle)
    (bundle / name).unlink()
    with pytest.raises(BundleError, match=re.escape(name)):
        open_bundle(bundle)
    (bundle / name).mkdir()
    with pytest.raises(BundleError, match=re.escape(name)):
        open_bundle(bundle)


@pytest.mark.parametrize("name", ["evil.so", "weights/second.data", ".hidden"])
def test_an_extra_file_is_named(bundle, name):
    (bundle / name).write_bytes(b"x")
    with pytest.raises(BundleError, match=re.escape(name)):
        open_bundle(bundle)


def test_a_link_out_of_the_bundle_is_refused(bundle, tmp_path):
    (tmp_path / "outside").write_bytes(FILES["engine.onnx"])
    (bundle / "engine.onnx").unlink()
    (bundle / "engine.onnx").symlink_to(tmp_path / "outside")
    with pytest.raises(BundleError, match=r"'engine\.onnx', which lies outside"):
        open_bundle(bundle)


@pytest.mark.parametrize("version", [0, 2, "1", None, [1]])
def test_another_schema_version_is_named(bundle, version):
    edit_manifest(bundle, lambda document: document.update(schema_version=version, future_field=1))
    with pytest.raises(BundleError, match=re.escape(f"schema version {version}, this Kiln reads version 1")):
        open_bundle(bundle)


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (lambda d: d.update(surprise=1), "surprise"),
        (lambda d: d.pop("sku"), "sku"),
        (lambda d: d.update(precision="fp7"), "precision"),
        (lambda d: d["backend"].update(name="tensorflow"), "backend.name"),
        (lambda d: d["files"]["engine.onnx"].update(sha256="xyz"), "files.engine.onnx.sha256"),
        (lambda d: d["files"]["engine.onnx"].update(bytes=-1), "files.engine.onnx.bytes"),
        (lambda d: d.update(decoder={"kv": 1}), "decoder"),
        (lambda d: d.update(files=[]), "files"),
    ],
)
def test_a_wrong_field_is_named(bundle, edit, field):
    edit_manifest(bundle, edit)
    with pytest.raises(BundleError, match=f"field '{re.escape(field)}"):
        open_bundle(bundle)


@pytest.mark.parametrize("text", ["", "[]", "7", "{", "null", "[" * 100_000, "\x00"])
def test_a_manifest_that_is_no_object(bundle, text):
    (bundle / MANIFEST).write_text(text)
    (bundle / IDENTITY).write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")
    with pytest.raises(BundleError, match=r"manifest\.json is not a JSON object"):
        open_bundle(bundle)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "weights/../../outside", "..", "a\0b"])
def test_names_that_leave_the_bundle_are_refused(bundle, name):
    (bundle.parent / "outside").write_bytes(b"x")
    edit_manifest(bundle, lambda document: document["files"].update({name: document["files"]["engine.onnx"]}))
    with pytest.raises(BundleError, match="lies outside the bundle"):
        open_bundle(bundle)


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d.update(engine="../engine.onnx"),
        lambda d: d.update(engine="/etc/hostname"),
        lambda d: d.update(tokenizer="../tokenizer"),
        lambda d: d["plugins"][0].update(file="/tmp/evil.so"),
        lambda d: d.update(engine=MANIFEST),
    ],
)
def test_used_files_without_a_digest_are_refused(bundle, edit):
    edit_manifest(bundle, edit)
    with pytest.raises(BundleError, match="lists no digest for it"):
        open_bundle(bundle)


def test_absent_cpu_features_are_named(tmp_path, monkeypatch):
    path = make(tmp_path / "bundle", features=("avx2", "avx512bw", "avx512f")).path
    monkeypatch.setattr(module, "host_cpu_features", lambda: frozenset({"avx2", "sse2"}))
    with pytest.raises(BundleError, match="needs the CPU features avx512bw, avx512f, which this machine lacks"):
        open_bundle(path)
    monkeypatch.setattr(module, "host_cpu_features", lambda: frozenset({"avx2", "avx512bw", "avx512f"}))
    open_bundle(path)


@pytest.mark.parametrize("kind", ["absent", "file", "empty folder", "long name"])
def test_what_is_no_bundle(tmp_path, kind):
    path = tmp_path / ("x" * 300 if kind == "long name" else "thing")
    if kind == "file":
        path.write_text("x")
    if kind == "empty folder":
        path.mkdir()
    with pytest.raises(BundleError, match=path.name):
        open_bundle(path)


def test_replacing_leaves_no_mixture_and_no_leftovers(bundle):
    inode = bundle.stat().st_ino
    (bundle / "weights" / "engine.onnx.data").write_bytes(b"damaged: a broken bundle may be replaced as well")
    make(bundle, b"2")
    assert bundle.stat().st_ino != inode
    assert open_bundle(bundle).manifest.name == "m2"
    assert leftovers(bundle.parent) == []


def test_a_link_to_a_bundle_stays_and_its_target_is_replaced(bundle, tmp_path):
    link = tmp_path / "current"
    link.symlink_to(bundle)
    make(link, b"2")
    assert link.is_symlink()
    assert open_bundle(bundle).manifest.name == "m2"
    assert leftovers(tmp_path) == []


def test_a_failing_builder_keeps_the_old_bundle_and_cleans_up(bundle, tmp_path):
    def broken(folder: Path) -> Manifest:
        fill(folder)
        raise RuntimeError("the check failed")

    for target in (bundle, tmp_path / "new" / "other"):
        with pytest.raises(RuntimeError, match="the check failed"):
            write_bundle(target, broken)
    assert open_bundle(bundle).manifest.name == "m"
    assert [path.name for path in tmp_path.iterdir()] == [bundle.name]


@pytest.mark.parametrize("kind", ["file", "full folder", "empty folder"])
def test_a_foreign_target_is_not_touched(tmp_path, kind):
    target = tmp_path / "mine"
    if kind == "file":
        target.write_text("precious")
    else:
        target.mkdir()
    if kind == "full folder":
        (target / "thesis.txt").write_text("precious")
    with pytest.raises(BundleError, match="exists and is not an engine bundle"):
        make(target)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", *(["thesis.txt"] if kind == "full folder" else [])]


def test_a_parent_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match=r"cannot write .* is no folder that may be written"):
        make(tmp_path / "file" / "bundle")


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path):
    dead = tmp_path / ".bundle.kiln-dead"
    dead.mkdir()
    (dead / "engine.onnx").write_text("half")
    (tmp_path / ".bundle.kiln-note").write_text("a file is not ours")
    (tmp_path / ".other.kiln-dead").mkdir()
    with module.temporary_sibling(tmp_path / "bundle") as living:
        assert not dead.exists()
        make(tmp_path / "bundle")
        assert living.is_dir()
    assert sorted(leftovers(tmp_path)) == [".bundle.kiln-note", ".other.kiln-dead"]


def test_names_with_pattern_characters(tmp_path):
    for name in ("[ab]*?", "b"):
        (tmp_path / f".{name}.kiln-dead").mkdir()
    make(tmp_path / "[ab]*?")
    assert leftovers(tmp_path) == [".b.kiln-dead"]
