"""EngineBundle: a folder that is written atomically and never opened unverified.

    NAME/manifest.json     schema, SKU, versions, digests of every other file
    NAME/manifest.sha256   digest of manifest.json: the bundle's identity
    NAME/engine.onnx ...   the engine, its weights, tokenizer files, plugin libraries

Knows files and digests; does not know how to run an engine.
"""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from engines.manifest import SCHEMA_VERSION, FileRecord, Manifest
from engines.sku import host_cpu_features
from plugins.errors import KilnError, first_problem

MANIFEST = "manifest.json"
IDENTITY = "manifest.sha256"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class BundleError(KilnError):
    """A bundle that must not be opened, or could not be written."""


@dataclass(frozen=True)
class EngineBundle:
    """A verified bundle on disk."""

    path: Path
    manifest: Manifest
    sha256: str

    @property
    def engine_path(self) -> Path:
        return self.path / self.manifest.engine

    @property
    def plugin_paths(self) -> list[Path]:
        return [self.path / plugin.file for plugin in self.manifest.plugins]

    @property
    def tokenizer_path(self) -> Path | None:
        return self.path / self.manifest.tokenizer if self.manifest.tokenizer else None


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, as hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def file_records(folder: Path) -> dict[str, FileRecord]:
    """Digest and size of every file below `folder`, keyed by its POSIX path relative to it."""
    return {
        path.relative_to(folder).as_posix(): FileRecord(sha256=file_sha256(path), bytes=path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def open_bundle(path: Path) -> EngineBundle:
    """Verify a bundle completely, for use on this machine. Raises BundleError naming what is wrong."""
    bundle = verify_bundle(path)
    require_runs_here(bundle)
    return bundle


def require_runs_here(bundle: EngineBundle) -> None:
    """Raise BundleError where this machine's CPU lacks what a bundle needs."""
    path, manifest = bundle.path, bundle.manifest
    missing = sorted(set(manifest.sku.cpu_features) - host_cpu_features())
    if missing:
        raise BundleError(
            f"{path} was built for SKU {manifest.sku.name} and needs the CPU features {', '.join(missing)}, which this "
            f"machine lacks; build it for this machine: build-engine {manifest.model.source} --sku cpu"
        )


def verify_bundle(path: Path) -> EngineBundle:
    """Verify a bundle of any machine type, to keep or pass on. Raises BundleError naming what is wrong."""
    while True:
        with _held(path) as folder:
            try:
                return _verified_bundle(path)
            except OSError as error:
                reason = BundleError(f"{path} cannot be read: {error}; check the path and its permissions")
                reason.__cause__ = error
            except BundleError as error:
                reason = error
            if _inode(path) == folder:  # else a builder replaced the bundle while we read it
                raise reason


def holds_bundle(path: Path, identity: str) -> bool:
    """Whether a folder has a whole bundle, and that one."""
    try:
        return verify_bundle(path).sha256 == identity
    except KilnError:
        return False


@contextmanager
def _held(path: Path) -> Iterator[tuple[int, int] | None]:
    """The folder's device and inode, which no other folder gets while it is held open, also if it is deleted."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield _inode(path)
        return
    try:
        yield _inode(descriptor)
    finally:
        os.close(descriptor)


def _inode(path: Path | int) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _verified_bundle(path: Path) -> EngineBundle:
    if not path.is_dir():
        raise BundleError(f"{path} is not a folder; expected an engine bundle made by build-engine")
    manifest_path, identity_path = path / MANIFEST, path / IDENTITY
    for required in (manifest_path, identity_path):
        if not required.is_file():
            raise BundleError(f"{path} has no {required.name}; expected an engine bundle made by build-engine")
    text = manifest_path.read_bytes()
    found = hashlib.sha256(text).hexdigest()
    expected = identity_path.read_bytes().decode(errors="replace")
    if f"{found}\n" != expected:
        raise BundleError(
            f"{manifest_path} has SHA-256 {found}, but {IDENTITY} says {expected.strip()!r}; rebuild the bundle"
        )
    manifest = manifest_from_json(manifest_path, text)
    _verify_files(path, manifest)
    return EngineBundle(path, manifest, found)


def manifest_from_json(path: Path, text: bytes) -> Manifest:
    """Raises BundleError, in which the manifest is called `path`."""
    try:
        document = json.loads(text)
        version = document.get("schema_version")
    except (ValueError, AttributeError, RecursionError) as error:
        raise BundleError(f"{path} is not a JSON object: {error}; rebuild the bundle") from error
    if version != SCHEMA_VERSION:
        raise BundleError(
            f"{path} has schema version {version}, this Kiln reads version {SCHEMA_VERSION}; "
            f"rebuild the bundle, or use the Kiln that made it ({document.get('kiln_version', 'unknown version')})"
        )
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        where, problem = first_problem(error)
        raise BundleError(f"{path}: field '{where}': {problem}; rebuild the bundle") from error


def _verify_files(path: Path, manifest: Manifest) -> None:
    for name, record in manifest.files.items():
        file = path / name
        if "\0" in name or not file.resolve().is_relative_to(path.resolve()):
            raise BundleError(f"{path / MANIFEST} names the file {name!r}, which lies outside the bundle")
        if not file.is_file():
            raise BundleError(f"{path} lacks the file {name}; copy the whole folder again, or rebuild the bundle")
        size = file.stat().st_size
        if size != record.bytes:
            raise BundleError(f"{file} has {size} bytes, the manifest says {record.bytes}; copy or rebuild the bundle")
        digest = file_sha256(file)
        if digest != record.sha256:
            raise BundleError(
                f"{file} has SHA-256 {digest}, the manifest says {record.sha256}; copy or rebuild the bundle"
            )
    listed = {*manifest.files, MANIFEST, IDENTITY}
    extra = sorted(
        name
        for name in (file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir())
        if name not in listed
    )
    if extra:
        raise BundleError(f"{path} holds {extra[0]}, which its manifest does not list; move it out of the bundle")
    named = {manifest.engine, *(plugin.file for plugin in manifest.plugins)}
    if manifest.tokenizer:
        named.add(f"{manifest.tokenizer}/tokenizer_config.json")
    for name in sorted(named - set(manifest.files)):
        raise BundleError(f"{path / MANIFEST} uses the file {name} but lists no digest for it; rebuild the bundle")


def write_bundle(path: Path, fill: Callable[[Path], Manifest]) -> EngineBundle:
    """Write a bundle so that `path` holds, at every moment, nothing, the old bundle or the new one.

    `fill` puts the files into the temporary sibling folder that it is given and returns their manifest.
    Builders of one path may run at once, the last to finish wins.
    """
    refuse_unusable_target(path)
    path = path.resolve()  # a link stays, what it names is replaced
    with temporary_sibling(path) as folder:
        manifest = fill(folder)
        text = (manifest.model_dump_json(indent=2) + "\n").encode()
        identity = hashlib.sha256(text).hexdigest()
        (folder / MANIFEST).write_bytes(text)
        (folder / IDENTITY).write_text(identity + "\n")
        _sync_tree(folder)
        _publish(folder, path)
    return EngineBundle(path, manifest, identity)


def install_bundle(path: Path, fill: Callable[[Path], None]) -> EngineBundle:
    """As `write_bundle`, for a bundle that was made elsewhere: `fill` puts all of its files, which are then verified.

    Raises BundleError for files that are no sound bundle; `path` stays as it was.
    """
    refuse_unusable_target(path)
    path = path.resolve()
    with temporary_sibling(path) as folder:
        fill(folder)
        bundle = verify_bundle(folder)
        _sync_tree(folder)
        _publish(folder, path)
    return replace(bundle, path=path)


def refuse_unusable_target(path: Path) -> None:
    """Raise BundleError where `path` holds something that is not a bundle of ours to replace, or cannot be made."""
    if path.exists() and not (path / MANIFEST).is_file():
        raise BundleError(f"{path} exists and is not an engine bundle; choose another --out or remove it")
    parent = next(parent for parent in path.resolve().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise BundleError(f"cannot write {path}: {parent} is no folder that may be written; choose another --out")


@contextmanager
def temporary_sibling(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, on the same file system, removed at the end.

    It is locked while its owner lives; those of owners that were killed are removed here first.
    """
    path = path.resolve()
    parent_is_new = not path.parent.exists()
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            folder, lock = _locked_sibling(path)
        except OSError as error:
            raise BundleError(f"cannot write beside {path}: {error.strerror}; choose another --out") from error
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
    finally:
        if parent_is_new:
            with suppress(OSError):  # not empty: the bundle is in it
                path.parent.rmdir()


def _locked_sibling(path: Path) -> tuple[Path, int]:
    """A new folder beside `path` and the descriptor that locks it."""
    prefix = f".{path.name}.kiln-"
    parent = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(parent, fcntl.LOCK_EX)  # nobody cleans up between our mkdtemp and our lock
        for leftover in path.parent.iterdir():
            if leftover.name.startswith(prefix):
                _remove_unless_locked(leftover)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
        try:
            folder.chmod(0o755)
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except BaseException:  # an interrupt
            folder.rmdir()
            raise
    finally:
        os.close(parent)
    return folder, lock


def _remove_unless_locked(folder: Path) -> None:
    try:
        owner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return  # its builder has just removed it, or it is a file and not ours
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)  # a builder that replaced a bundle may be removing the old one
    except BlockingIOError:
        pass  # its builder still runs
    finally:
        os.close(owner)


def _publish(temporary: Path, path: Path) -> None:
    """Put the new folder in place in one step; afterwards `temporary` is gone or holds the old bundle."""
    try:
        temporary.rename(path)  # fails where a bundle is, also one that another builder has put there by now
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        libc = ctypes.CDLL(None, use_errno=True)
        source, target = os.fsencode(temporary), os.fsencode(path)
        if libc.renameat2(_AT_FDCWD, source, _AT_FDCWD, target, _RENAME_EXCHANGE) != 0:
            code = ctypes.get_errno()
            reason = "the file system cannot exchange two folders" if code == errno.EINVAL else os.strerror(code)
            raise BundleError(
                f"cannot replace {path} atomically: {reason}; choose another --out or remove it first"
            ) from error
    _sync(path.parent)


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
