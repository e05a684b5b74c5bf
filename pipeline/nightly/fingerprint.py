"""What an engine is made from, as digests and versions: where none of them changed, nothing is built.

model      SHA-256 of the model's files
options    how it is built, and the digest of the file of inputs if there is one
sku        the SKU's entry
code       SHA-256 of Kiln's own sources, operators included
backend    versions of the libraries that export, rewrite and run
driver     the processor, and a GPU's driver; "elsewhere" for a SKU that this machine cannot execute
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from engines.bundle import file_sha256
from engines.sku import Sku, host_cpu_features
from pipeline.compare.machine import machine_description, package_versions
from pipeline.ledger.entry import shortened
from pipeline.nightly.config import BuildOptions

ELSEWHERE = "elsewhere"
_LIBRARIES = ("onnxruntime", "onnxruntime-gpu", "tensorrt", "onnx", "onnx-graphsurgeon", "onnxscript", "torch")
_LIBRARIES_OF_MODELS = ("transformers", "tokenizers", "numpy")
_NOT_IN_ENGINES = ("pipeline/nightly", "pipeline/registry", "pipeline/load_test", "pipeline/deploy", "engines/server")
_SOURCES = {".py", ".cc", ".cu", ".cuh", ".h", ".toml"}
_NVIDIA = Path("/proc/driver/nvidia/version")


@cache
def code_digest() -> str:
    """Of all sources that can change an engine; those that serve, store or schedule it are left out."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for layer in ("plugins", "passes", "engines", "pipeline"):
        for path in sorted((root / layer).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.suffix in _SOURCES and not name.startswith(_NOT_IN_ENGINES):
                digest.update(f"{name} {file_sha256(path)}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Machine:
    """What runs the builds."""

    features: frozenset[str] = field(default_factory=host_cpu_features)
    description: Mapping[str, str] = field(default_factory=machine_description)
    versions: Mapping[str, str] = field(default_factory=lambda: package_versions(*_LIBRARIES, *_LIBRARIES_OF_MODELS))
    code: str = field(default_factory=code_digest)

    def can_run(self, sku: Sku) -> bool:
        """Whether engines of a SKU can be executed, and so judged, here."""
        return sku.is_cpu and self.features.issuperset(sku.cpu_features)

    def driver_for(self, sku: Sku) -> str:
        if not self.can_run(sku):
            return ELSEWHERE
        if sku.is_cpu or not _NVIDIA.is_file():
            return self.description["cpu"]
        return f"{self.description['cpu']}; {_NVIDIA.read_text().splitlines()[0]}"


def inputs_of(model_sha256: str, sku: Sku, options: BuildOptions, machine: Machine) -> dict[str, str]:
    """What a bundle is made from, by name."""
    built = options.model_dump(mode="json")
    if options.inputs is not None:
        built["inputs"] = file_sha256(options.inputs)
    return {
        "model": model_sha256,
        "options": digest_of(built),
        "sku": digest_of(sku.model_dump(mode="json")),
        "code": machine.code,
        "backend": ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        "driver": machine.driver_for(sku),
    }


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """What differs, in words: a digest's first characters, or a version."""
    names = [name for name in after if before.get(name) != after[name]]
    return {name: _change(before.get(name, "none"), after[name]) for name in names}


def _change(before: str, after: str) -> str:
    """Of a list, only what differs."""
    old, new = before.split(", "), after.split(", ")
    if len(old) > 1:
        before = ", ".join(part for part in old if part not in new) or "nothing"
        after = ", ".join(part for part in new if part not in old) or "nothing"
    return f"{shortened(before)} -> {shortened(after)}"


def digest_of(document: object) -> str:
    """SHA-256 of what JSON holds."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
