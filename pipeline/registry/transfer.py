"""Files to chunks and back: uploads and downloads that go on where they were broken off.

A file is stored in parts of `chunk_bytes`, each an object named by its SHA-256. What is there already is not sent
again, and each part is checked against its name before it is used, so that neither a lost connection nor a flipped bit
costs more than one part. Knows nothing of releases.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from pipeline.registry.records import StoredFile, chunk_key
from pipeline.registry.store import RegistryError, Store

CHUNK_BYTES = 32 << 20
_STREAMS = 4
"""Parts that are on their way at the same time, each in memory."""

Told = Callable[[int], None]
"""Is told the bytes of every part that is done."""


def stored_file(path: Path, chunk_bytes: int) -> StoredFile:
    """How a file is stored."""
    whole, chunks, size = hashlib.sha256(), [], 0
    for part in _parts(path, chunk_bytes):
        whole.update(part)
        chunks.append(hashlib.sha256(part).hexdigest())
        size += len(part)
    return StoredFile(bytes=size, sha256=whole.hexdigest(), chunks=tuple(chunks))


def upload(
    store: Store,
    folder: Path,
    files: Mapping[str, StoredFile],
    chunk_bytes: int,
    told: Told = lambda _: None,
    again: bool = False,
) -> None:
    """Put the parts that are not there in their full length; with `again` all of them.

    Raises RegistryError where a file changed since it was described.
    """

    def send(task: tuple[str, int, str]) -> None:
        name, index, digest = task
        size = min(chunk_bytes, files[name].bytes - index * chunk_bytes)
        if again or store.size(chunk_key(digest)) != size:
            with (folder / name).open("rb") as stream:
                stream.seek(index * chunk_bytes)
                part = stream.read(size)
            if hashlib.sha256(part).hexdigest() != digest:
                raise RegistryError(f"{folder / name} changed while it was published; nothing was; publish it again")
            store.put(chunk_key(digest), part)
        told(size)

    seen: set[str] = set()
    tasks = []
    for name, file in files.items():
        for index, digest in enumerate(file.chunks):
            if digest not in seen:
                tasks.append((name, index, digest))
            seen.add(digest)
    with ThreadPoolExecutor(_STREAMS) as pool:
        for _ in pool.map(send, tasks):
            pass


def read_chunk(store: Store, digest: str, size: int) -> bytes:
    """A part, checked. Raises RegistryError for one that is missing, cut off or changed."""
    data = store.read(chunk_key(digest))
    where = f"{store.url}/{chunk_key(digest)}"
    again = "publish the bundle again with --repair"
    if data is None:
        raise RegistryError(f"{where} is missing; {again}")
    if len(data) != size:
        raise RegistryError(f"{where} has {len(data)} bytes, its release says {size}: the upload was cut off; {again}")
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise RegistryError(f"{where} has SHA-256 {found}: it was changed or damaged; {again}")
    return data


def download(
    store: Store, folder: Path, files: Mapping[str, StoredFile], chunk_bytes: int, told: Told = lambda _: None
) -> None:
    """Bring files into a folder, after the parts that an earlier download has left there, which are checked again."""
    for name, file in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = 0
        if path.exists():
            parts = zip(_parts(path, chunk_bytes), file.chunks, strict=False)
            for part, digest in parts:
                if hashlib.sha256(part).hexdigest() != digest:
                    break
                whole += 1
                told(len(part))
        with path.open("r+b" if path.exists() else "wb") as stream:
            stream.truncate(min(whole * chunk_bytes, file.bytes))
            stream.seek(0, os.SEEK_END)
            for index, digest in enumerate(file.chunks[whole:], whole):
                part = read_chunk(store, digest, min(chunk_bytes, file.bytes - index * chunk_bytes))
                stream.write(part)
                told(len(part))


@contextmanager
def partial_folder(target: Path, identity: str) -> Iterator[Path]:
    """Where a download into `target` gathers its files; it stays after a failure. Other processes wait for it."""
    target = target.resolve()
    folder = target.with_name(f".{target.name}.pull-{identity[:16]}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise RegistryError(f"cannot write beside {target}: {error.strerror}; choose another --out") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        folder.mkdir(exist_ok=True)  # whoever held it may have finished
        yield folder
    finally:
        os.close(descriptor)


def _parts(path: Path, chunk_bytes: int) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while part := stream.read(chunk_bytes):
            yield part
