"""Records of a registry: read with their signatures checked, written only where nothing is yet; and who is at work.

Everything that changes is a log of numbered records, of which the highest number counts. A writer that read number n
creates n + 1; where another one was faster the store says so, and the writer looks again. So channels need no lock.

Only the collector deletes, so it alone must be kept apart from the others: a writer leaves a lease and then looks for
the collector's lock; the collector leaves its lock and then looks for leases. With a store that shows what was written,
at least one of them sees the other and gives way.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from pydantic import BaseModel

from pipeline.registry.keys import SigningKey, TrustedKey, TrustedKeys
from pipeline.registry.records import FORMAT
from pipeline.registry.signed import Record, seal, unseal
from pipeline.registry.store import RegistryError, Store

MARKER = "kiln-registry.json"
LOCK = "gc/lock"
LEASES = "leases"
_POLL = 0.5


class Access:
    """`trusted` None reads what nobody signed, `key` None writes unsigned: the caller was told to.

    `owner` names whose lease it is: an owner that was killed takes its own lease over when it starts again.
    """

    def __init__(
        self, store: Store, trusted: TrustedKeys | None, key: SigningKey | None, owner: str | None = None
    ) -> None:
        self.store, self.trusted, self.key = store, trusted, key
        self.owner = owner or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._writing = threading.Lock()

    def require_format(self, create: bool = False) -> None:
        """Raise RegistryError where there is no registry of this format; an empty place becomes one with `create`."""
        found = self.store.read(MARKER)
        if found is None and create:
            self.store.create(MARKER, json.dumps({"format": FORMAT}).encode())
            found = self.store.read(MARKER)
        if found is None:
            raise RegistryError(f"{self.store.url} holds no registry; check the URL, or publish into it first")
        try:
            version = json.loads(found)["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise RegistryError(f"{self.store.url}/{MARKER} is damaged; expected {{'format': {FORMAT}}}") from error
        if version != FORMAT:
            raise RegistryError(
                f"{self.store.url} has format {version}, this Kiln knows {FORMAT}; use the Kiln that made it"
            )

    def load(self, key: str, kind: type[Record]) -> tuple[Record, TrustedKey | None] | None:
        """A record and who signed it; None where there is none."""
        data = self.store.read(key)
        return None if data is None else unseal(data, key, kind, self.trusted, f"{self.store.url}/{key}")

    def create(self, key: str, record: BaseModel) -> bool:
        """Write a record unless there is one there; whether it was written."""
        return self.store.create(key, seal(record, key, self.key))

    def newest(self, folder: str) -> int:
        """The highest number in a log, 0 for an empty one."""
        numbers = [number for key in self.store.keys(folder) if (number := number_of(key))]
        return max(numbers, default=0)

    @contextmanager
    def lease(self, wait: float = 60.0) -> Iterator[None]:
        """Keeps the collector from deleting. Raises RegistryError where one is still at work after `wait` seconds."""
        with self._writing:
            self.require_format(create=True)
            self.store.require_conditional(MARKER)
            place = f"{LEASES}/{self.owner}"
            end = time.monotonic() + wait
            while True:
                self.store.put(place, json.dumps({"created": time.time(), "owner": self.owner}).encode())
                holder = self.store.read(LOCK)
                if holder is None:
                    break
                self.store.delete(place)
                if time.monotonic() >= end:
                    raise RegistryError(f"{self.store.url} is being collected by {told(holder)}; try again later")
                time.sleep(_POLL)
            try:
                yield
            finally:
                self.store.delete(place)

    def require_lease(self) -> None:
        """Raise RegistryError where the collector took the lease for that of a dead process."""
        if self.store.size(f"{LEASES}/{self.owner}") is None:
            raise RegistryError(f"{self.store.url}: this took longer than a lease may last; start it again")


def number_of(key: str) -> int | None:
    """The number that a record's key ends with."""
    last = key.rpartition("/")[2]
    return int(last) if last.isdigit() else None


def told(holder: bytes) -> str:
    """Who holds a lock or lease, and since when."""
    try:
        document = json.loads(holder)
        since = datetime.fromtimestamp(document["created"], UTC)
        return f"{document['owner']} since {since:%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, KeyError, TypeError):
        return "an unknown process"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
