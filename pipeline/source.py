"""Where a model comes from: turns what the user typed into a `ModelSource`, without loading weights.

Understands, in this order: a short name of `pipeline.zoo`; `package://PACKAGE/FILE`; a local `.onnx` or
`.gguf` file or Hugging Face folder; `module:callable`; a hub id `ORGANISATION/NAME`.
"""

import hashlib
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from engines.bundle import file_sha256
from pipeline.zoo import ZOO
from plugins.errors import KilnError, first_line

SourceKind = Literal["huggingface", "gguf", "module", "onnx"]
FORMS = (
    "a Hugging Face folder, a .gguf or .onnx file, package://PACKAGE/FILE, module:callable, a hub id "
    f"ORGANISATION/NAME, or one of {', '.join(ZOO)}"
)
_CALLABLE = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
_PACKAGE = "package://"
_HUB_ANSWERS_IN = 10.0
"""Seconds. The hub's client waits for ever on a server that accepts connections and never answers."""


@dataclass(frozen=True)
class ModelSource:
    """`spec` as typed; `path` is the folder or file, None for `module:callable`; `name` is the default bundle name.

    `files` are what the model is made of, as far as files show it.
    """

    spec: str
    kind: SourceKind
    path: Path | None
    target: str
    name: str
    files: tuple[Path, ...]

    @cached_property
    def sha256(self) -> str:
        """Digest of `files`. Read on first use: a model that cannot fit is refused without reading its weights."""
        if len(self.files) == 1:
            return file_sha256(self.files[0])
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name} {file_sha256(file)}\n".encode())
        return digest.hexdigest()


def resolve_source(spec: str) -> ModelSource:
    """Find the model. Raises KilnError saying what was looked for and which forms are understood."""
    target = ZOO[spec].spec if spec in ZOO else spec
    if target.startswith(_PACKAGE):
        return _source_from_path(spec, _package_file(spec, target))
    path = Path(os.path.expanduser(target))
    if os.path.exists(path):
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
        files = tuple(sorted(file for file in path.iterdir() if file.is_file()))
    elif path.suffix in (".onnx", ".gguf"):
        kind = "onnx" if path.suffix == ".onnx" else "gguf"
        files = (path,)
    else:
        raise KilnError(f"{path} is neither a folder nor an .onnx or .gguf file; expected {FORMS}")
    name = spec if spec in ZOO else _slug(path.name if path.is_dir() else path.stem)
    return ModelSource(spec, kind, path, str(path), name, files)


def _source_from_callable(spec: str, target: str) -> ModelSource:
    module = target.partition(":")[0]
    if str(Path.cwd()) not in sys.path:  # a console script's own folder is there instead
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.util.find_spec(module)
    except Exception:  # it imports the parents of a dotted name
        found = None
    if found is None or found.origin is None or not Path(found.origin).is_file():
        raise KilnError(f"MODEL '{spec}': no module '{module}' can be imported from here; expected {FORMS}")
    name = spec if spec in ZOO else _slug(target)
    return ModelSource(spec, "module", None, target, name, (Path(found.origin),))


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
    """A snapshot from the hub; where the hub does not answer, one that was downloaded before."""
    from huggingface_hub import HfApi, snapshot_download

    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    unreachable: Exception | None = None
    try:
        HfApi().model_info(hub_id, timeout=_HUB_ANSWERS_IN)
    except Exception as error:  # the hub's client raises many types, also from its HTTP library
        unreachable = error
    try:
        return Path(snapshot_download(hub_id, allow_patterns=wanted, local_files_only=unreachable is not None))
    except Exception as error:
        cause = unreachable or error
        reason = first_line(cause)
        raise KilnError(
            f"MODEL '{hub_id}' is no local path, and as a hub id it cannot be downloaded ({reason}); expected {FORMS}"
        ) from cause


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "model"
