"""Where a model comes from: turns what the user typed into a `ModelSource`, without loading weights.

Understands, in this order: a short name of `pipeline.zoo`; `package://PACKAGE/FILE`; a local `.onnx` or
`.gguf` file or Hugging Face folder; `module:callable`; a hub id `ORGANISATION/NAME`.
"""

import hashlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engines.bundle import file_sha256
from pipeline.zoo import ZOO
from plugins.errors import KilnError

SourceKind = Literal["huggingface", "gguf", "module", "onnx"]
FORMS = (
    "a Hugging Face folder, a .gguf or .onnx file, package://PACKAGE/FILE, module:callable, a hub id "
    f"ORGANISATION/NAME, or one of {', '.join(ZOO)}"
)
_CALLABLE = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
_PACKAGE = "package://"


@dataclass(frozen=True)
class ModelSource:
    """`spec` as typed; `path` is the folder or file, None for `module:callable`; `name` is the default bundle name."""

    spec: str
    kind: SourceKind
    path: Path | None
    target: str
    name: str
    sha256: str


def resolve_source(spec: str) -> ModelSource:
    """Find the model. Raises KilnError saying what was looked for and which forms are understood."""
    target = ZOO[spec].spec if spec in ZOO else spec
    if target.startswith(_PACKAGE):
        return _source_from_path(spec, _package_file(spec, target))
    path = Path(target).expanduser()
    if path.exists():
        return _source_from_path(spec, path.resolve())
    if _CALLABLE.match(target):
        return _source_from_callable(spec, target)
    if _HUB_ID.match(target) and path.suffix not in (".onnx", ".gguf") and not target.startswith("."):
        return _source_from_path(spec, _download(target))
    raise KilnError(f"MODEL '{spec}' does not exist; expected {FORMS}")


def _source_from_path(spec: str, path: Path) -> ModelSource:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise KilnError(f"{path} has no config.json, so it is no Hugging Face model folder; expected {FORMS}")
        kind: SourceKind = "huggingface"
        digest = hashlib.sha256()
        for file in sorted(file for file in path.iterdir() if file.is_file()):
            digest.update(f"{file.name} {file_sha256(file)}\n".encode())
        sha256 = digest.hexdigest()
    elif path.suffix in (".onnx", ".gguf"):
        kind = "onnx" if path.suffix == ".onnx" else "gguf"
        sha256 = file_sha256(path)
    else:
        raise KilnError(f"{path} is neither a folder nor an .onnx or .gguf file; expected {FORMS}")
    name = spec if spec in ZOO else _slug(path.name if path.is_dir() else path.stem)
    return ModelSource(spec, kind, path, str(path), name, sha256)


def _source_from_callable(spec: str, target: str) -> ModelSource:
    module = target.partition(":")[0]
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None:
        raise KilnError(f"MODEL '{spec}': no module '{module}' can be imported from here; expected {FORMS}")
    name = spec if spec in ZOO else _slug(target)
    return ModelSource(spec, "module", None, target, name, file_sha256(Path(found.origin)))


def _package_file(spec: str, target: str) -> Path:
    package, _, file = target.removeprefix(_PACKAGE).partition("/")
    # Found without importing it: some packages that carry weights import what is not installed here.
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        hints = [entry.install for entry in ZOO.values() if entry.spec.startswith(f"{_PACKAGE}{package}/")]
        hint = hints[0] if hints else f"install the distribution that holds '{package}'"
        raise KilnError(f"MODEL '{spec}': the package '{package}' is not installed; {hint}")
    root = Path(found.submodule_search_locations[0]).resolve()
    path = (root / file).resolve()
    if not file or not path.is_relative_to(root) or not path.exists():
        raise KilnError(f"MODEL '{spec}': the package '{package}' at {root} has no file '{file}'")
    return path


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=wanted))
    except Exception as error:  # the hub's client raises many types, also from its HTTP library
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise KilnError(
            f"MODEL '{hub_id}' is no local path, and as a hub id it cannot be downloaded ({reason}); expected {FORMS}"
        ) from error


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "model"
