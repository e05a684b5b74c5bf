"""Where a node of the cluster gets a bundle from: a folder that all nodes see, or a release of a registry.

A source is data and travels to every replica, which brings the bundle to its node: a release is pulled once for each
node, however many replicas start there, and verified against the trusted keys that travel along. Whoever only reads
text needs no weights: the tokenizer alone can be brought, too.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engines.bundle import MANIFEST, EngineBundle, holds_bundle, manifest_from_json, verify_bundle
from engines.manifest import Manifest
from pipeline.registry.keys import trusted_keys_from_bytes
from pipeline.registry.pull import pull
from pipeline.registry.records import Release
from pipeline.registry.registry import Registry
from pipeline.registry.store import RegistryError, Store
from pipeline.registry.transfer import download, partial_folder
from plugins.errors import KilnError

CACHE = "~/.cache/kiln/bundles"
"""Of each node; the home folder is that of whoever started Ray there."""


class BundleSource(Protocol):
    """Data that can be sent to another node."""

    @property
    def title(self) -> str:
        """For people."""
        ...

    @property
    def identity(self) -> str:
        """The bundle's digest."""
        ...

    def manifest(self) -> Manifest:
        """What is in it, without its weights. Raises KilnError."""
        ...

    def bring(self) -> Path:
        """The whole bundle on this node, verified. Raises KilnError."""
        ...

    def bring_tokenizer(self) -> Path | None:
        """The tokenizer's folder on this node; None where the bundle has none. Raises KilnError."""
        ...


@dataclass(frozen=True)
class FolderSource:
    """A folder under the same path on every node."""

    path: Path
    identity: str

    @classmethod
    def open(cls, path: Path) -> "FolderSource":
        return cls(path.resolve(), verify_bundle(path).sha256)

    @property
    def title(self) -> str:
        return str(self.path)

    def manifest(self) -> Manifest:
        return self._verified().manifest

    def bring(self) -> Path:
        return self._verified().path

    def bring_tokenizer(self) -> Path | None:
        return self._verified().tokenizer_path

    def _verified(self) -> EngineBundle:
        bundle = verify_bundle(self.path)
        if bundle.sha256 != self.identity:
            raise KilnError(
                f"{self.path} holds the bundle {bundle.sha256[:12]}, expected {self.identity[:12]}: it was rebuilt; "
                "deploy it again, or use a registry, where versions never change"
            )
        return bundle


@dataclass(frozen=True)
class ReleaseSource:
    """One version of a model for a SKU. `trust` is the content of a file of keys; None takes what nobody signed."""

    url: str
    trust: bytes | None
    model: str
    sku: str
    version: int
    identity: str
    cache: str = CACHE

    @classmethod
    def find(
        cls, url: str, trust: bytes | None, model: str, sku: str, version: int, cache: str = CACHE
    ) -> "ReleaseSource":
        """Raises RegistryError where there is no such release."""
        release = registry_at(url, trust).release(model, sku, version)
        return cls(url, trust, model, sku, version, release.bundle, cache)

    @property
    def title(self) -> str:
        return f"{self.model} for {self.sku}, version {self.version}"

    def manifest(self) -> Manifest:
        return manifest_in(self._part((MANIFEST,)))

    def bring(self) -> Path:
        target = self._target("bundle")
        with _alone(target.parent):  # the other replicas of this node wait, and find it there
            if not holds_bundle(target, self.identity):
                pull(self._registry(), self.model, self.sku, target, version=self.version, allow_downgrade=True)
        return target

    def bring_tokenizer(self) -> Path | None:
        folder = self.manifest().tokenizer
        if folder is None:
            return None
        files = tuple(name for name in self._release().files if name.startswith(f"{folder}/"))
        return self._part(files) / folder

    def _part(self, files: tuple[str, ...]) -> Path:
        """A folder with some of the files, each checked."""
        release, target = self._release(), self._target("part")
        with partial_folder(target, release.bundle) as folder:
            wanted = {name: release.files[name] for name in files}
            download(self._registry().store, folder, wanted, release.chunk_bytes)
            target.mkdir(parents=True, exist_ok=True)
            for name in files:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(folder / name, target / name)
        return target

    def _target(self, what: str) -> Path:
        target = Path(self.cache).expanduser() / f"{self.model}-{self.sku}-{self.identity[:16]}" / what
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _release(self) -> Release:
        release = self._registry().release(self.model, self.sku, self.version)
        if release.bundle != self.identity:
            raise RegistryError(f"{self.title} of {self.url} is not the bundle {self.identity[:12]} that was deployed")
        return release

    def _registry(self) -> Registry:
        return registry_at(self.url, self.trust)


def manifest_in(folder: Path) -> Manifest:
    """Of a folder whose files have been verified. Raises KilnError."""
    return manifest_from_json(folder / MANIFEST, (folder / MANIFEST).read_bytes())


def registry_at(url: str, trust: bytes | None) -> Registry:
    """To read from."""
    trusted = None if trust is None else trusted_keys_from_bytes(trust, Path("the trusted keys of the deployment"))
    return Registry(Store(url), trusted)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time; the lock ends with it."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)  # the folder itself is locked by who installs
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
