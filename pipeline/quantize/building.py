"""From a float graph to a quantised engine in a bundle's folder: plan, rewrite, bind and judge it."""

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines.manifest import QuantizationRecord
from engines.runtime.tokenizer import Tokenizer
from engines.sku import Sku
from passes.manager import PassReport
from passes.onnx_model import OnnxModel
from passes.standard import BINDING_TABLE, NARROWING_TABLE, PassSwitches
from pipeline.cpu_form import write_cpu_form
from pipeline.gate.graphs import GraphFile
from pipeline.gate.report import GateReport, require_passed
from pipeline.optimize import OptimizeConfig, optimize, target_for
from pipeline.progress import Progress
from pipeline.quantize.candidates import candidate, rescaling
from pipeline.quantize.config import QuantizeConfig, refuse_schemes
from pipeline.quantize.judging import judge_engine
from pipeline.quantize.sku_speed import speed_of
from pipeline.quantize.stage import quantisation_for
from pipeline.quantize.state import Quantisation
from pipeline.verify import Feeds
from plugins.errors import KilnError

FOLDER = "quantization"
"""Of a bundle, for what its quantisation rests on."""


def quantised_engine(
    model: OnnxModel,
    engine: Path,
    sku: Sku,
    passes: OptimizeConfig,
    config: QuantizeConfig,
    plugins: Sequence[Path],
    tokenizer: Path | None,
    feeds: Sequence[Feeds] | None,
    progress: Progress,
) -> tuple[OnnxModel, tuple[PassReport, ...], QuantizationRecord]:
    """Write the quantised form of a float graph to `engine`, and plan, table and report into the folder beside it.

    `model` and `plugins` run on this machine; what is made for a GPU is judged in the form that its CPU runs.
    Raises KilnError, and GateFailedError with the report, for an engine that is beyond its limits.
    """
    work = engine.parent / "work"
    work.mkdir()
    found = quantisation_for(
        model,
        plugins,
        Tokenizer(tokenizer) if tokenizer is not None and tokenizer.is_dir() else None,
        target_for(model, sku, passes),
        config,
        work,
        progress,
        passes.threads,
        speed_of(sku) if sku.provider == "CUDAExecutionProvider" else None,
    )
    refuse_schemes(found.schemes, sku)
    for scheme, count in _schemes(found).items():
        progress.note(f"{count} of {len(found.layers)} layers as {scheme}")

    def write(target: Path, keep: Sequence[str] = ()) -> tuple[OnnxModel, tuple[PassReport, ...]]:
        return rewritten(model, target, found, sku, passes, feeds, keep)

    with progress.stage("quantise"):
        made, reports = write(engine)
    with candidate(model.path, found.plan, lambda plan: rescaling(found.passes())) as rescaled:
        report = judge_engine(
            model,
            _runnable(engine, work, sku),
            found.schemes,
            found.subject,
            found.specs,
            config,
            lambda keep: _runnable(write(work / "trial.onnx", keep)[0].path, work, sku),
            progress,
            passes.threads,
            GraphFile(rescaled, model.decoder, tuple(plugins)),
        )
    require_passed(report)
    progress.note(report.sentence())
    shutil.rmtree(work)
    return made, reports, written(engine.parent, found, report)


def rewritten(
    model: OnnxModel,
    target: Path,
    found: Quantisation,
    sku: Sku,
    passes: OptimizeConfig,
    feeds: Sequence[Feeds] | None = None,
    keep: Sequence[str] = (),
) -> tuple[OnnxModel, tuple[PassReport, ...]]:
    """Apply a plan to the graph that it was made for, with more layers kept float, and bind the result to its backend.

    Raises KilnError where a pass of the plan had to be undone.
    """
    first, bound = found.passes(keep), dict[str, dict[str, Any]]()
    table = BINDING_TABLE if found.target.backend == "cpu" else NARROWING_TABLE
    if found.target.backend == "cuda":
        bound = found.bound(keep)
        passes = replace(passes, switches=_enabling(passes.switches, bound))
    made = optimize(model, target, sku, passes, feeds, table=table, first=first)
    reports = made[1]
    for report in (*reports[: len(first)], *(report for report in reports[len(first) :] if report.name in bound)):
        if problem := report.rolled_back or ("" if report.changed or report.name not in bound else report.notes):
            raise KilnError(f"the model cannot be quantised as planned: {report.name}: {problem}")
    return made


def _enabling(switches: PassSwitches, options: Mapping[str, Mapping[str, Any]]) -> PassSwitches:
    """The user's choice, with these passes and their options."""
    return replace(
        switches,
        only=(*switches.only, *options) if switches.only else (),
        enable=(*switches.enable, *options),
        disable=tuple(name for name in switches.disable if name not in options),
        options={**switches.options, **options},
    )


def _runnable(engine: Path, work: Path, sku: Sku) -> Path:
    """The engine itself, or its form for this machine's CPU in a folder that the next one takes over."""
    if sku.is_cpu:
        return engine
    folder = work / "form"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return write_cpu_form(engine, folder)


def _schemes(found: Quantisation) -> dict[str, int]:
    return dict(Counter(found.plan.of(layer.name).scheme for layer in found.layers))


def written(folder: Path, found: Quantisation, report: GateReport) -> QuantizationRecord:
    """Write plan, table and the gate's report into a bundle's folder, whether it passed or not."""
    (folder / FOLDER).mkdir()
    texts = {"plan.toml": found.plan.to_toml(), "gate.json": report.to_json()}
    if found.table is not None:
        texts["calibration.json"] = found.table.to_json()
    for name, text in texts.items():
        (folder / FOLDER / name).write_text(text, encoding="utf-8")
    return QuantizationRecord(
        schemes=_schemes(found),
        kv=found.plan.kv,
        plan=f"{FOLDER}/plan.toml",
        table=f"{FOLDER}/calibration.json" if found.table is not None else None,
        data_sha256=None if found.table is None else found.table.data_sha256,
        gate=f"{FOLDER}/gate.json",
        verdict=report.sentence(),
        unmeasured=found.unmeasured,
    )
