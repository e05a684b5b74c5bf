"""How people say that an engine shall be opened: for `kiln serve`, and for each replica of `kiln deploy ray`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from engines.manifest import Manifest
from engines.runtime.opening import default_config
from engines.runtime.scheduler import SchedulerConfig
from engines.server.messages import EngineSpec


@dataclass(frozen=True)
class EngineOptions:
    """What is None is the bundle's own, as `kiln tune` wrote it, or what fits. The names are the scheduler's."""

    max_running: int | None = None
    tokens_per_step: int | None = None
    max_waiting: int | None = None
    speculate: int | None = None
    kv_blocks: int | None = None
    swap_blocks: int = 0
    kv: Literal["paged", "static"] = "paged"
    window: int | None = None
    threads: int | None = None

    def config(self, manifest: Manifest) -> SchedulerConfig | None:
        """How requests share a decoder; None for other models. Raises KilnError for values out of range."""
        if manifest.decoder is None:
            return None
        names = ("max_running", "tokens_per_step", "max_waiting", "speculate")
        return replace(default_config(manifest), **{n: value for n in names if (value := getattr(self, n)) is not None})

    def spec(self, path: Path, manifest: Manifest, name: str | None) -> EngineSpec:
        """How to open a bundle, by default under its own name. Raises KilnError for values out of range."""
        blocks = self.kv_blocks
        if blocks is None and self.kv == "paged" and manifest.serving is not None:
            blocks = manifest.serving.kv_blocks
        return EngineSpec(
            path,
            name or manifest.name,
            self.kv,
            blocks,
            self.swap_blocks,
            self.window,
            self.config(manifest),
            threads=self.threads,
        )
