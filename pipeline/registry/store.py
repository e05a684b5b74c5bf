"""Objects by key under one URL, on any file system that fsspec knows: the few operations that the registry rests on.

What is relied on, and nothing else:

1. An object appears whole or not at all. Object stores put so; on a local disk it is written aside, synced and linked.
2. `create` writes only where nothing is, decided by the store, so that of two writers one is told. A local disk has
   link(2); S3 a put with `If-None-Match: *`, Google Cloud Storage one with `ifGenerationMatch=0`, Azure one with
   `If-None-Match: *`: fsspec's `pipe_file(mode="create")` in their packages. Whether the store obeys is asked of it
   before the first write, for some that speak these protocols ignore the condition.
3. What was put or deleted is seen by the next read and the next listing, of anybody. S3 (since December 2020), Google
   Cloud Storage and Azure promise it; clients' caches of listings are turned off here.

Other file systems are read, and written only where the caller says that nobody else writes. Knows nothing of bundles.
"""

import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from plugins.errors import KilnError, first_line

_PLAIN = {"file", "local", "memory"}
_CONDITIONAL = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}
"""Protocols whose packages pass the store's own conditional put on."""
_COLLISION = "ConditionalRequestConflict"
"""S3's code (409) for a conditional put that met another one of the same object: neither written nor refused."""
_LONGEST_WAIT = 10.0
"""Seconds between tries after collisions; waits double up to it."""
_MEMORY = threading.Lock()
"""fsspec's memory file system looks before it writes, in two steps."""
_ASIDE = ".kiln-aside-"


class RegistryError(KilnError):
    """The registry holds what it must not, lacks what it should have, or cannot be reached."""


class UntrustedError(RegistryError):
    """A record that must not be used: unsigned, signed by others, changed, or put into another's place."""


def absolute_url(url: str) -> str:
    """The same store for processes in other folders."""
    return url if "://" in url else str(Path(url).resolve())


class Store:
    """Keys are relative POSIX paths. Every method raises RegistryError for a store that cannot be reached."""

    def __init__(self, url: str, single_writer: bool = False) -> None:
        """`single_writer`: the caller vouches that nobody else writes, so any file system will do."""
        import fsspec

        self.url = url.rstrip("/")
        protocol, _, rest = url.rpartition("://")
        if not url or (protocol and not rest):
            raise RegistryError(
                f"{url!r} is no registry; expected a folder or an fsspec URL such as s3://BUCKET/PREFIX"
            )
        try:
            plain = not protocol or protocol in _PLAIN
            options = {} if plain else {"use_listings_cache": False, "skip_instance_cache": True}
            self._fs, root = fsspec.core.url_to_fs(self.url, **options)
        except Exception as error:  # packages of many hands
            raise RegistryError(
                f"{url} cannot be opened: {first_line(error)}; install the package that fsspec needs for it (s3fs for "
                "s3://, gcsfs for gs://, adlfs for az://), or check the URL"
            ) from error
        self._root = root.rstrip("/")
        names = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self._local, self._memory = "file" in names, "memory" in names
        self._told_apart = bool(names & _PLAIN) or single_writer
        self._may_write = self._told_apart or bool(names & _CONDITIONAL)

    def read(self, key: str) -> bytes | None:
        """The object; None where there is none."""
        with self._reached(key):
            try:
                return bytes(self._fs.cat_file(self._path(key)))
            except FileNotFoundError:
                return None

    def size(self, key: str) -> int | None:
        """Bytes of the object; None where there is none."""
        with self._reached(key):
            self._fs.invalidate_cache()
            try:
                return int(self._fs.info(self._path(key))["size"])
            except FileNotFoundError:
                return None

    def put(self, key: str, data: bytes) -> None:
        """Write an object, over another one where there is one."""
        self._require_writable()
        with self._reached(key):
            if self._local:
                with self._aside(key, data) as temporary:
                    os.replace(temporary, self._path(key))
                    _sync_folder(Path(self._path(key)).parent)
            else:
                self._fs.pipe_file(self._path(key), data)

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless there is another one; whether it lies there now.

        An answer may be lost on its way and the package's next try be refused, so what lies there is read then: it may
        be ours.
        """
        self._require_writable()
        wait = 0.1
        with self._reached(key):
            while True:
                try:
                    self._create(key, data)
                    return True
                except FileExistsError:
                    return self.read(key) == data
                except OSError as error:
                    if _COLLISION not in str(error) or wait > _LONGEST_WAIT:
                        raise
                time.sleep(wait * random.uniform(0.5, 1))
                wait *= 2

    def _create(self, key: str, data: bytes) -> None:
        """Raises FileExistsError where there is one."""
        if self._local:
            with self._aside(key, data) as temporary:
                os.link(temporary, self._path(key))
                _sync_folder(Path(self._path(key)).parent)
        else:
            with _MEMORY if self._memory else nullcontext():
                self._fs.pipe_file(self._path(key), data, mode="create")

    def require_conditional(self, key: str) -> None:
        """Raise RegistryError where the store does not refuse to create an object that is there, with its own bytes."""
        if self._told_apart:
            return
        with self._reached(key):
            data = self.read(key)
            assert data is not None, "only for what is there"
            try:
                self._create(key, data)
            except FileExistsError:
                self._told_apart = True
                return
        raise RegistryError(
            f"{self.url}: the store takes a conditional put of an object that is there, so it would not tell two "
            "writers apart; use one that obeys If-None-Match (S3, Azure) or ifGenerationMatch (Google), or say "
            "--single-writer if nobody else writes"
        )

    def keys(self, prefix: str) -> list[str]:
        """Keys of all objects below a folder, sorted."""
        with self._reached(prefix):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._path(prefix))
            except FileNotFoundError:
                return []
        names = [path[len(self._root) + 1 :] for path in found]
        return sorted(name for name in names if not name.rpartition("/")[2].startswith(_ASIDE))

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of all objects below a folder, by key."""
        with self._reached(prefix):
            self._fs.invalidate_cache()
            try:
                found: dict[str, Any] = self._fs.find(self._path(prefix), detail=True)
            except FileNotFoundError:
                return {}
        return {path[len(self._root) + 1 :]: int(entry["size"]) for path, entry in sorted(found.items())}

    def delete(self, key: str) -> None:
        """Nothing where there is none."""
        self._require_writable()
        with self._reached(key), suppress(FileNotFoundError):
            self._fs.rm_file(self._path(key))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _require_writable(self) -> None:
        if not self._may_write:
            raise RegistryError(
                f"{self.url}: fsspec does not promise here that of two writers of one object one is told, which the "
                "registry needs; use a folder, s3://, gs:// or az://, or say --single-writer if nobody else writes"
            )

    @contextmanager
    def _reached(self, key: str) -> Iterator[None]:
        """fsspec's packages raise errors of many types."""
        try:
            yield
        except (KilnError, FileExistsError):
            raise
        except Exception as error:
            raise RegistryError(
                f"{self.url}/{key}: {first_line(error)} ({type(error).__name__}); check the URL, the network and your "
                "permissions"
            ) from error

    @contextmanager
    def _aside(self, key: str, data: bytes) -> Iterator[str]:
        """A synced temporary file beside the object, removed at the end."""
        target = Path(self._path(key))
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=_ASIDE, dir=target.parent)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                os.fchmod(stream.fileno(), 0o644)
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            yield name
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name)

    def asides(self) -> list[Path]:
        """What killed writers left behind on a local disk; object stores keep nothing of a put that did not end."""
        return sorted(Path(self._root).rglob(f"{_ASIDE}*")) if self._local else []


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
