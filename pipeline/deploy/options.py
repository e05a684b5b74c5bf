"""What a deployment is made of, as data: how engines are opened, how many there are, how the HTTP side behaves."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engines.manifest import Manifest
from engines.runtime.opening import default_config
from engines.server.auth import KeyRing
from engines.server.config import ServerConfig
from engines.server.encoder import EmbeddingConfig
from engines.server.messages import EngineSpec
from pipeline.deploy.bundles import BundleSource
from pipeline.deploy.prefixes import RoutingConfig
from pipeline.deploy.scaling import ScalingTargets
from plugins.errors import KilnError


@dataclass(frozen=True)
class EngineOptions:
    """`kiln serve`'s options of the same names. None: the bundle's, or what fits."""

    max_running: int | None = None
    tokens_per_step: int | None = None
    speculate: int | None = None
    kv_blocks: int | None = None
    swap_blocks: int = 0
    threads: int | None = None

    def spec(self, path: Path, manifest: Manifest, name: str) -> EngineSpec:
        """How to open a bundle. Raises KilnError where options contradict each other."""
        names = ("max_running", "tokens_per_step", "speculate")
        changes = {each: value for each in names if (value := getattr(self, each)) is not None}
        config = None if manifest.decoder is None else replace(default_config(manifest), **changes)
        blocks = self.kv_blocks
        if blocks is None and manifest.serving is not None:
            blocks = manifest.serving.kv_blocks
        return EngineSpec(path, name, "paged", blocks, self.swap_blocks, config=config, threads=self.threads)


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


@dataclass(frozen=True)
class DeployOptions:
    """Everything that versions of one application share."""

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
