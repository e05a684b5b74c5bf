"""Garbage collection: removes old releases and what nobody refers to, while nobody writes.

Kept are, of every model and SKU, the newest releases, what channels point to, and what each would roll back to first.
Everything is read and verified before anything is deleted: a record that somebody changed could hide what it refers to.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pipeline.registry.access import LEASES, LOCK, MARKER, told
from pipeline.registry.records import CHANNELS, Release, folder_of, release_key
from pipeline.registry.registry import Registry
from pipeline.registry.store import RegistryError


@dataclass(frozen=True)
class CollectConfig:
    """`keep` newest releases of each model and SKU; a lease older than `grace` seconds is that of a dead process."""

    keep: int = 5
    grace: float = 24 * 3600.0
    dry_run: bool = False
    break_lock: bool = False

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise RegistryError(f"--keep is {self.keep}; expected at least 1")
        if self.grace < 0:
            raise RegistryError(f"--grace is {self.grace}; expected 0 or more")


@dataclass(frozen=True)
class Collected:
    """What was, or would be, removed."""

    releases: tuple[str, ...]
    objects: int
    bytes: int


def collect(registry: Registry, config: CollectConfig) -> Collected:
    """Raises RegistryError where somebody publishes, where another collector is at work, and for unsound records."""
    registry.access.require_format()
    registry.store.require_conditional(MARKER)
    with _alone(registry, config) as ours:
        kept, dropped = _sort_releases(registry, config.keep)
        named = {digest for release in kept for digest in release.chunks}
        records = [key for release in dropped for key in _records_of(registry, release)]
        alive = {_attestations(release) for release in (*kept, *dropped)}
        records += [key for key in registry.store.keys("attestations") if key.rpartition("/")[0] not in alive]
        sizes = registry.store.sizes("chunks")
        chunks = [key for key in sizes if key.rpartition("/")[2] not in named]
        if not config.dry_run:
            for key in (*records, *chunks):  # records first: what is left after a crash is only unreferenced
                if registry.store.read(LOCK) != ours:
                    raise RegistryError(f"{registry.store.url}: somebody broke the collector's lock; start it again")
                registry.store.delete(key)
            for path in registry.store.asides():
                if path.stat().st_mtime < time.time() - config.grace:
                    path.unlink(missing_ok=True)
    names = tuple(f"{release.model} {release.sku} {release.version}" for release in dropped)
    return Collected(names, len(records) + len(chunks), sum(sizes[key] for key in chunks))


@contextmanager
def _alone(registry: Registry, config: CollectConfig) -> Iterator[bytes]:
    """The collector's lock, with no writer at work."""
    store = registry.store
    if config.break_lock:
        store.delete(LOCK)
    ours = json.dumps({"created": time.time(), "owner": registry.access.owner}).encode()
    if not store.create(LOCK, ours):
        holder = told(store.read(LOCK) or b"")
        raise RegistryError(f"{store.url} is being collected by {holder}; if that process is dead, say --break-lock")
    try:
        for key in store.keys(LEASES):
            lease = store.read(key)
            if lease is None:
                continue  # its writer has just finished
            if _age(lease) < config.grace:
                raise RegistryError(
                    f"{store.url} is being written by {told(lease)}; try again later. If that process is dead, "
                    "say --grace SECONDS, less than its lease's age"
                )
            store.delete(key)
        yield ours
    finally:
        if store.read(LOCK) == ours:  # else somebody broke it, and it is another's
            store.delete(LOCK)


def _age(lease: bytes) -> float:
    """Seconds; a lease that cannot be read counts as new, for it is being written."""
    try:
        return time.time() - float(json.loads(lease)["created"])
    except (ValueError, KeyError, TypeError):
        return 0.0


def _sort_releases(registry: Registry, keep: int) -> tuple[list[Release], list[Release]]:
    """Those that stay and those that go."""
    kept: list[Release] = []
    dropped: list[Release] = []
    for model, sku in registry.pairs():
        versions = registry.versions(model, sku)
        wanted = set(versions[-keep:])
        for channel in CHANNELS:
            head = registry.channel(model, sku, channel)
            if head is not None:
                wanted |= {head.version, *head.previous[-1:]}
        for version in versions:
            (kept if version in wanted else dropped).append(registry.release(model, sku, version))
    return kept, dropped


def _attestations(release: Release) -> str:
    return folder_of("attestations", release.model, release.sku, f"{release.version:08d}")


def _records_of(registry: Registry, release: Release) -> list[str]:
    """The release first: without it nobody follows what is left."""
    key = release_key(release.model, release.sku, release.version)
    return [key, *registry.store.keys(_attestations(release))]
