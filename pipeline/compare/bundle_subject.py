"""An engine bundle as one side of a comparison, opened as it is opened to serve."""

from pathlib import Path

from engines.bundle import open_bundle
from engines.runtime.engine import Engine
from pipeline.compare.engine_subject import EngineDecoder, EnginePlain, scheduling
from pipeline.compare.inputs import input_specs_from_graph
from pipeline.compare.machine import package_versions
from pipeline.compare.report import Side
from pipeline.compare.subjects import Subject
from pipeline.compare.tolerance import PRECISION_OF_DTYPE
from pipeline.io_layout import permutations_from_path


def bundle_subject_from_path(path: Path, threads: int | None = None, max_running: int = 1) -> Subject:
    """Verify and open a bundle to run so many texts at once. Raises KilnError for one that must not be opened."""
    bundle = open_bundle(path)
    manifest = bundle.manifest
    side = Side(
        kind="bundle",
        name=f"bundle {manifest.name}",
        path=str(path),
        sha256=bundle.sha256,
        precision=manifest.precision,
        cache=PRECISION_OF_DTYPE[manifest.decoder.kv.dtype] if manifest.decoder else None,
        versions={"kiln": manifest.kiln_version, **package_versions("onnxruntime")},
    )
    engine = Engine.open(path, config=scheduling(max_running), threads=threads)
    if manifest.decoder is None:
        specs = input_specs_from_graph(bundle.engine_path, manifest.inputs)
        return EnginePlain(side, engine, specs, permutations_from_path(bundle.engine_path))
    encode = engine.tokenizer.encode if bundle.tokenizer_path else None
    return EngineDecoder(side, engine, manifest.decoder, encode)
