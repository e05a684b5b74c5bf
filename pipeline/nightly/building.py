"""One bundle of one model for one SKU, also for a SKU that this machine cannot execute."""

from pathlib import Path

from engines.bundle import EngineBundle
from pipeline.build import build
from pipeline.nightly.config import BuildOptions
from pipeline.progress import Progress


def build_into(
    out: Path, source: str, sku: str, sku_file: Path | None, options: BuildOptions, progress: Progress
) -> EngineBundle:
    """Raises KilnError where the model cannot be built."""
    return build(source, [sku], options.config(out, sku_file), progress)[0].bundle
