"""A Triton model repository from bundles without a KV cache: a folder for each model, a numbered one for each version.

    OUT/minilm/config.pbtxt
    OUT/minilm/1/model.onnx        and beside it its external data and operator libraries, or model.plan

A version appears at once, complete, so a server that polls the repository never loads half of one. Files are copies:
the repository may be given other owners without touching the bundles. Knows nothing of Triton's settings, which are
`pipeline.export_repo_config`'s.
"""

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.backends.onnxruntime import OnnxRuntimeModel
from engines.bundle import EngineBundle, require_runs_here, temporary_sibling, verify_bundle
from engines.runtime.batch_check import relative_error
from engines.runtime.batch_queue import BatchingConfig
from engines.runtime.shape_buckets import Arrays, layout_from_tensors
from passes.onnx_model import external_files, load_structure
from pipeline.compare.inputs import input_specs_from_graph, sample_of_batch
from pipeline.export_repo_config import (
    TritonOptions,
    can_batch,
    interface_text,
    model_file,
    require_served_by_triton,
    text_from_manifest,
)
from pipeline.progress import Progress
from plugins.errors import KilnError

CONFIG = "config.pbtxt"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TRIALS = 4
"""Requests that are run together and alone."""


@dataclass(frozen=True)
class Exported:
    """A model in the repository. `alone` says why its requests are not run together, None where they are."""

    name: str
    version: int
    folder: Path
    alone: str | None


def export_triton(
    bundles: Sequence[Path], names: Sequence[str | None], out: Path, options: TritonOptions, progress: Progress
) -> list[Exported]:
    """Write each bundle as the next version of its model; `names` go before the bundles' own.

    All bundles are verified and judged before the first is written. Raises KilnError for a bundle that Triton cannot
    serve, a name twice, and a model of the same name with other inputs or outputs.
    """
    opened = [verify_bundle(path) for path in bundles]
    for bundle in opened:
        require_served_by_triton(bundle.manifest)
    chosen = [name or bundle.manifest.name for name, bundle in zip(names, opened, strict=True)]
    for name in chosen:
        if not _NAME.fullmatch(name):
            raise KilnError(f"{name!r} is no name for a folder of a model; give --name with letters, digits, . _ -")
        if chosen.count(name) > 1:
            raise KilnError(f"two bundles are called {name}; give each its own --name, in order")
    plans = [_planned(bundle, out / name, options, progress) for bundle, name in zip(opened, chosen, strict=True)]
    return [_written(plan, progress) for plan in plans]


@dataclass(frozen=True)
class _Plan:
    """What will be written."""

    bundle: EngineBundle
    folder: Path
    version: int
    config: str
    alone: str | None


def _planned(bundle: EngineBundle, folder: Path, options: TritonOptions, progress: Progress) -> _Plan:
    version = max(versions_in(folder), default=0) + 1
    with progress.stage(f"{folder.name}: batching"):
        alone = _why_alone(bundle, progress)
    batches = alone is None
    _require_same_interface(folder, interface_text(bundle.manifest, batched=batches))
    config = text_from_manifest(bundle.manifest, bundle.sha256, folder.name, version, options, batches)
    return _Plan(bundle, folder, version, config, alone)


def _written(plan: _Plan, progress: Progress) -> Exported:
    name, alone = plan.folder.name, plan.alone
    with progress.stage(f"{name}: version {plan.version}"):
        _write(plan)
    progress.note(f"{name}: {'requests share calls' if alone is None else f'one request a call: {alone}'}")
    return Exported(name, plan.version, plan.folder, alone)


def versions_in(folder: Path) -> list[int]:
    """Versions that Triton sees: numbers without a leading zero."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(path.name) for path in found if path.is_dir() and re.fullmatch(r"[1-9][0-9]*", path.name))


def _require_same_interface(folder: Path, interface: str) -> None:
    """One configuration holds for all versions of a model, and clients for its inputs and outputs."""
    if not folder.exists():
        return
    path = folder / CONFIG
    if not path.is_file():
        raise KilnError(f"{folder} exists and has no {CONFIG}; expected a model of a repository: give another --name")
    if interface not in path.read_text(encoding="utf-8", errors="replace"):
        raise KilnError(
            f"{path} was not written for these inputs and outputs, and holds for all versions of {folder.name}; "
            "give another --name, or remove the folder"
        )


def _write(plan: _Plan) -> None:
    """A server that polls finds, at every moment, what it had or what is new: never a version without its files.

    The configuration names files of its version, so it comes last; of a new model first, as nothing is loaded before.
    """
    target, config = plan.folder / str(plan.version), plan.folder / CONFIG
    with temporary_sibling(target) as staging:  # hidden, which Triton does not take for a version
        _copy(plan.bundle, staging)
        is_new = not config.exists()
        if is_new:
            _replace(config, plan.config)
        try:
            staging.rename(target)
        except OSError as error:
            raise KilnError(f"{target} appeared meanwhile: another export works there; start again") from error
        if not is_new:
            _replace(config, plan.config)


def _replace(path: Path, text: str) -> None:
    pending = path.with_name(f".{path.name}.{os.getpid()}")
    pending.write_text(text, encoding="utf-8")
    os.replace(pending, path)


def _copy(bundle: EngineBundle, folder: Path) -> None:
    """The model under Triton's name; what the graph names keeps its own."""
    engine = bundle.engine_path
    files = {model_file(bundle.manifest): engine}
    if bundle.manifest.tensorrt is None:
        names = [file.relative_to(engine.parent).as_posix() for file in external_files(engine, load_structure(engine))]
        files |= {name: engine.parent / name for name in names}
        files |= {plugin.file: bundle.path / plugin.file for plugin in bundle.manifest.plugins}
    for name, source in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _why_alone(bundle: EngineBundle, progress: Progress) -> str | None:
    """Why requests must not share a call, None where they may. Triton believes what it is told, so it is tried here.

    Kiln's own server compares the first batches with what each request gets alone (engines.runtime.batch_check).
    """
    if not can_batch(bundle.manifest):
        return "no dimension leads all inputs and outputs under one name"
    try:
        return _found_mixing(bundle)
    except KilnError as error:
        progress.note(f"that rows of a batch do not mix was not tried: {error}")
        return None


def _found_mixing(bundle: EngineBundle) -> str | None:
    """Runs requests together and alone. Raises KilnError where this machine, or random inputs, cannot do that."""
    if bundle.manifest.tensorrt is not None:
        raise KilnError("a plan runs on its own GPU only")
    require_runs_here(bundle)
    model = OnnxRuntimeModel(bundle.engine_path, provider=bundle.manifest.backend.provider, plugins=bundle.plugin_paths)
    try:
        specs = input_specs_from_graph(bundle.engine_path, bundle.manifest.inputs)
        requests = [sample_of_batch(specs, 1, seed) for seed in range(_TRIALS)]
        alone = [model.infer(request) for request in requests]
        layout = layout_from_tensors(model.inputs, model.outputs)
        try:
            together = layout.part(model.infer(layout.merge(requests)), requests)
        except KilnError as error:
            return f"it fails on several requests at once and not on each alone: {error}"
    finally:
        model.close()
    return _difference(together, alone)


def _difference(together: Sequence[Arrays], alone: Sequence[Arrays]) -> str | None:
    error = max(map(relative_error, together, alone))
    if error <= BatchingConfig.tolerance:
        return None
    return f"its results in a batch differ from those alone by {error:.1e} of the largest value"
