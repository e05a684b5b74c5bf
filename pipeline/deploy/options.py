"""What a deployment is, as data: how many replicas there are, how the HTTP side behaves, what versions share."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engines.manifest import Manifest
from engines.server.auth import KeyRing
from engines.server.config import ServerConfig
from engines.server.encoder import EmbeddingConfig
from engines.server.options import EngineOptions
from pipeline.deploy.bundles import BundleSource
from pipeline.deploy.prefixes import RoutingConfig
from pipeline.deploy.scaling import ScalingTargets
from plugins.errors import KilnError


@dataclass(frozen=True)
class ReplicaCount:
    """From `least` to `most` replicas, by load; the same number twice: always so many. Raises KilnError."""

    least: int
    most: int
    targets: ScalingTargets = field(default_factory=ScalingTargets)
    up_delay: float = 5.0
    """Seconds that more must be wanted before there are more."""
    down_delay: float = 300.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise KilnError(f"there shall be {self.least} to {self.most} replicas; expected 1 <= least <= most")
        for name in ("up_delay", "down_delay"):
            if getattr(self, name) < 0:
                raise KilnError(f"{name} is {getattr(self, name)}; expected seconds, 0 or more")

    @property
    def fixed(self) -> int:
        """The number that the steward insists on; 0 where the load decides."""
        return self.least if self.least == self.most else 0


@dataclass(frozen=True)
class HttpOptions:
    """The HTTP side. Keys are digests, so nothing secret is kept."""

    model: str
    config: ServerConfig = field(default_factory=ServerConfig)
    keys: KeyRing | None = None
    embeddings: Mapping[str, EmbeddingConfig] = field(default_factory=dict)
    retries: int = 3
    """Replicas that a request is sent to after the first one failed it before any output."""
    replicas: int = 1


@dataclass(frozen=True)
class Contract:
    """What all versions of an application have in common, because one HTTP side reads text for them."""

    sku: str
    generates: bool
    tokenizer: Mapping[str, str]
    """Digests of its files."""

    @classmethod
    def of(cls, manifest: Manifest) -> "Contract":
        folder = manifest.tokenizer
        files = {name: file.sha256 for name, file in manifest.files.items() if folder and name.startswith(f"{folder}/")}
        return cls(manifest.sku.name, manifest.decoder is not None, files)


def require_name(app: str) -> None:
    """Raise KilnError for a name that an application cannot have: those of its versions are APP-DIGEST."""
    if not re.fullmatch(r"[A-Za-z0-9_]+", app):
        raise KilnError(f"an application's name is {app!r}; expected letters, digits and _")


@dataclass(frozen=True)
class DeployOptions:
    """Everything that versions of one application share. Raises KilnError for a name that it cannot have."""

    app: str
    contract: Contract
    engine: EngineOptions
    count: ReplicaCount
    actor: Mapping[str, Any]
    """Ray's options of a replica: CPUs, GPUs, labels."""
    http: HttpOptions
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    places: int = 16
    """Requests that run in a replica at a time; it is sent as many again, to have work at hand."""
    waiting: int = 4096
    """Requests that may wait for a replica in each replica of the HTTP side (429)."""
    drain: float = 60.0
    """Seconds that requests have to finish when their replica is taken away."""

    def __post_init__(self) -> None:
        require_name(self.app)

    @property
    def ongoing(self) -> int:
        """Requests that a replica is sent at a time."""
        return 2 * self.places


@dataclass(frozen=True)
class Version:
    """One bundle in service: a Serve application of engine replicas."""

    app: str
    source: BundleSource

    @classmethod
    def of(cls, app: str, source: BundleSource) -> "Version":
        return cls(f"{app}-{source.identity[:12]}", source)
