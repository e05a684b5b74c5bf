"""From a float graph to a quantised engine in a bundle's folder: plan, rewrite, bind and judge it."""

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from engines.manifest import QuantizationRecord
from engines.runtime.tokenizer import Tokenizer
from engines.sku import Sku
from passes.manager import PassReport
from passes.onnx_model import OnnxModel
from passes.standard import BINDING_TABLE
from pipeline.gate.report import GateReport, require_passed
from pipeline.optimize import OptimizeConfig, optimize, target_for
from pipeline.progress import Progress
from pipeline.quantize.config import QuantizeConfig
from pipeline.quantize.judging import judge_engine
from pipeline.quantize.stage import Quantisation, quantisation_for
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
    )
    for scheme, count in _schemes(found).items():
        progress.note(f"{count} of {len(found.layers)} layers as {scheme}")

    def write(target: Path, keep: Sequence[str] = ()) -> tuple[OnnxModel, tuple[PassReport, ...]]:
        return rewritten(model, target, found, sku, passes, feeds, keep)

    with progress.stage("quantise"):
        made, reports = write(engine)
    report = judge_engine(
        model,
        engine,
        found.schemes,
        found.subject,
        found.specs,
        config,
        lambda keep: write(work / "trial.onnx", keep)[0].path,
        progress,
        passes.threads,
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
    first = found.passes(keep)
    made = optimize(model, target, sku, passes, feeds, table=BINDING_TABLE, first=first)
    for report in made[1][: len(first)]:
        if report.rolled_back:
            raise KilnError(f"the model cannot be quantised as planned: {report.name}: {report.rolled_back}")
    return made


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
    )
