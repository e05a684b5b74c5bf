"""The journal: what a run has finished, so that one that was killed goes on there.

A file of JSON lines, each synced before the next step begins. A line that was cut off is that of a step that did not
end. Results are found by job, stage and a key that names all that they depend on, and only within the unfinished run:
what changed in between is done again. Knows nothing of what stages do.
"""

import fcntl
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plugins.errors import KilnError


class AlreadyRunningError(KilnError):
    """Another run works in the same folder."""


class Journal:
    """Of one run. `resumed`: it continues one that did not end."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        entries = list(_entries(path))
        ended = {entry["run"] for entry in entries if entry["event"] == "end"}
        last = entries[-1]["run"] if entries else None
        self.resumed = last is not None and last not in ended
        self.run: str = (
            last
            if last is not None and self.resumed
            else f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{uuid.uuid4().hex[:6]}"
        )
        self._done: dict[tuple[str, str, str], Any] = {
            (entry["job"], entry["stage"], entry["key"]): entry["result"]
            for entry in entries
            if entry["run"] == self.run and entry["event"] == "done"
        }
        if not self.resumed:
            self._append({"event": "start"})

    def find(self, job: str, stage: str, key: str) -> Any | None:
        """The result of a finished stage; None where it has not ended."""
        return self._done.get((job, stage, key))

    def note(self, job: str, stage: str, key: str, result: Any) -> None:
        """A stage has ended. `result` is what JSON holds, and not None."""
        self._done[job, stage, key] = result
        self._append({"event": "done", "job": job, "stage": stage, "key": key, "result": result})

    def end(self) -> None:
        """Nothing of this run is used again."""
        self._append({"event": "end"})

    def _append(self, entry: dict[str, Any]) -> None:
        line = json.dumps({"run": self.run, "time": time.time(), **entry}) + "\n"
        with self._lock, self._path.open("ab") as stream:
            if stream.tell() and not _ends_with_newline(self._path):
                stream.write(b"\n")
            stream.write(line.encode())
            stream.flush()
            os.fsync(stream.fileno())


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut off
        if isinstance(entry, dict) and {"run", "event"} <= set(entry):
            yield entry


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) == b"\n"


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """One run at a time works in a folder; the lock ends with its process. Raises AlreadyRunningError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise KilnError(f"the working folder {folder} cannot be written: {error.strerror}; change 'work'") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AlreadyRunningError(
                f"another nightly run works in {folder}; wait for it, or give this one its own"
            ) from error
        yield
    finally:
        os.close(descriptor)
