"""What every part of the report gets."""

from dataclasses import dataclass
from pathlib import Path

from pipeline.progress import Progress
from quantization_report.bundles import Maker
from quantization_report.corpora import Corpora


@dataclass(frozen=True)
class Setting:
    """`folder` is for bundles and temporary files. `only` names the variants that are made; () for all of them."""

    folder: Path
    corpora: Corpora
    threads: int
    progress: Progress
    quick: bool = False
    times: bool = True
    gate: bool = True
    seconds: float = 5.0
    """For each set of variants that are timed in turn."""
    only: tuple[str, ...] = ()
    peers: Path | None = None
    """Folder of results of other stacks, as ../shared/anchors/cpu/run_all.py writes it."""

    def maker(self, name: str, spec: str, inputs: Path | None = None) -> Maker:
        """Of the bundles of one model."""
        return Maker(spec, self.folder / f"{name}-bundles", self.threads, self.progress, self.gate, inputs)

    def wants(self, variant: str) -> bool:
        return not self.only or variant in self.only
