"""Manifests for bundles that tests write by hand. What a build records is `pipeline.build`'s to say, not this."""

from pathlib import Path
from typing import Any

from engines.bundle import file_records
from engines.manifest import BackendRecord, Manifest, ModelRecord, SkuRecord


def manifest_of(folder: Path, name: str, **changes: Any) -> Manifest:
    """The least that a bundle with the files in `folder` must say, and `changes` to it."""
    least: dict[str, Any] = {
        "kiln_version": "0",
        "created": "2026-01-01T00:00:00Z",
        "name": name,
        "model": ModelRecord(source=name, architecture=name, sha256="0" * 64, parameters=1),
        "sku": SkuRecord(name="cpu-avx2", arch="x86-64-v3"),
        "backend": BackendRecord(name="onnxruntime", version="1.31", provider="CPUExecutionProvider"),
        "precision": "fp32",
        "inputs": (),
        "outputs": (),
        "files": file_records(folder),
    }
    return Manifest(**{**least, **changes})
