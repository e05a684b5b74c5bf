"""What child processes do: build, and the three gates. Each takes a folder and options, and gives what JSON holds."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.nightly.config import AccuracyOptions, BuildOptions, DeterminismOptions, SpeedOptions
from pipeline.progress import Progress

CANDIDATE, STABLE, GATE_PAGE = "candidate", "stable", "accuracy.html"
OUTPUTS, STABLE_OUTPUTS = "outputs.npz", "stable-outputs.npz"
"""Names in a task's folder."""


def _build(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    from pipeline.nightly.building import build_into

    bundle = build_into(
        folder / options["out"],
        options["source"],
        options["sku"],
        _path(options["sku_file"]),
        BuildOptions.model_validate(options["build"]),
        _progress(),
    )
    outputs = folder / OUTPUTS
    outputs.unlink(missing_ok=True)
    if options["determinism"] is not None:
        from pipeline.nightly.determinism import record_outputs

        determinism = DeterminismOptions.model_validate(options["determinism"])
        record_outputs(bundle.path, determinism, options["threads"], outputs)
    return {"bundle": bundle.sha256}


def _accuracy(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    from pipeline.nightly.accuracy import judge_accuracy

    return judge_accuracy(
        folder / STABLE if options["source"] is None else options["source"],
        folder / CANDIDATE,
        AccuracyOptions.model_validate(options["accuracy"]),
        options["threads"],
        folder / GATE_PAGE,
        _progress(),
    )


def _determinism(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    from pipeline.nightly.building import build_into
    from pipeline.nightly.determinism import judge_determinism

    build, sku_file = BuildOptions.model_validate(options["build"]), _path(options["sku_file"])
    progress = _progress()

    def rebuild(number: int) -> Path:
        out = folder / f"rebuild-{number}"
        return build_into(out, options["source"], options["sku"], sku_file, build, progress).path

    return judge_determinism(
        folder / STABLE,
        folder / CANDIDATE,
        folder / STABLE_OUTPUTS,
        rebuild,
        DeterminismOptions.model_validate(options["determinism"]),
        options["threads"],
        progress,
    )


def _speed(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    from pipeline.nightly.speed import judge_speed

    speed = SpeedOptions.model_validate(options["speed"])
    return judge_speed(folder / STABLE, folder / CANDIDATE, speed, options["threads"], _progress())


TASKS: Mapping[str, Callable[[Path, Mapping[str, Any]], dict[str, Any]]] = {
    "build": _build,
    "accuracy": _accuracy,
    "determinism": _determinism,
    "speed": _speed,
}
"""By kind. A gate's result has `passed`, `text` for people and `figures`."""

NEEDS: Mapping[str, tuple[str, ...]] = {
    "build": (),
    "accuracy": (CANDIDATE, STABLE),
    "determinism": (CANDIDATE, STABLE, STABLE_OUTPUTS),
    "speed": (CANDIDATE, STABLE),
}
"""What a task reads in its folder, by kind: files, or folders of files."""

GIVES: Mapping[str, tuple[str, ...]] = {
    "build": (CANDIDATE, OUTPUTS),
    "accuracy": (GATE_PAGE,),
    "determinism": (),
    "speed": (),
}
"""What it leaves there for others."""


def _progress() -> Progress:
    return Progress(Console(highlight=False, width=200))


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
