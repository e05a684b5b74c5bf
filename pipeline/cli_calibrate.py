"""`kiln calibrate`: options and output; the work is in `pipeline.calibration`."""

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click

from passes.quantization.table import Method
from pipeline.calibration import Calibration, CalibrationConfig, calibrate
from pipeline.calibration.coverage import CoverageLimits
from pipeline.calibration.data import FORMS, DataConfig
from pipeline.calibration.drift import html_from_drift, json_from_drift, table_from_drift
from pipeline.calibration.observe import ObserveConfig
from pipeline.calibration.ranges import RangeConfig
from pipeline.calibration.subject import calibration_model_from_path
from pipeline.forecast import size
from pipeline.page import write_page
from pipeline.printing import print_result
from pipeline.progress import Progress
from plugins.errors import KilnError

_DATA, _COVERAGE, _OBSERVE, _RANGES = DataConfig(), CoverageLimits(), ObserveConfig(), RangeConfig()
_FILE = click.Path(path_type=Path)


def calibration_options(command: Any) -> Any:
    """The data, what it must cover, and how ranges are chosen: what `config_from_options` reads."""
    options = [
        click.option(
            "--calibration", "specs", multiple=True, metavar="SPEC", help=f"{FORMS}; may be given repeatedly."
        ),
        click.option("--traffic", type=_FILE, help="Trace of the requests to expect, as kiln load reads it."),
        click.option("--preprocess", type=_FILE, help="TOML file that says how images become the model's input."),
        click.option(
            "--samples",
            type=int,
            default=_DATA.samples,
            show_default=True,
            help="Of each length stratum; 8 times as many images.",
        ),
        click.option("--seed", type=int, default=_DATA.seed, show_default=True, help="Of the choice of samples."),
        click.option(
            "--strata", help="Bounds of the length strata in tokens: 64,512,4096, or chat=512,documents=8192."
        ),
        click.option("--min-samples", type=int, default=_COVERAGE.min_samples, show_default=True, help="Of a stratum."),
        click.option("--min-tokens", type=int, default=_COVERAGE.min_tokens, show_default=True, help="Of a stratum."),
        click.option(
            "--min-share",
            type=float,
            default=_COVERAGE.min_share,
            show_default=True,
            help="Least share of samples in a stratum, as part of the traffic's share.",
        ),
        click.option("--override-coverage", is_flag=True, help="Accept a set that leaves lengths out; it is recorded."),
        click.option("--method", type=click.Choice(get_args(Method)), default=_RANGES.method, show_default=True),
        click.option("--percentile", type=float, default=_RANGES.percentile, show_default=True),
        click.option("--symmetric/--asymmetric", default=_RANGES.symmetric, show_default=True),
        click.option("--per-channel", is_flag=True, help="Ranges of every channel, too."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def config_from_options(options: dict[str, Any]) -> CalibrationConfig:
    """Of the options of `calibration_options`; takes them out of `options`."""
    take = options.pop
    return CalibrationConfig(
        data=DataConfig(take("samples"), seed=take("seed"), strata=take("strata"), preprocess=take("preprocess")),
        traffic=take("traffic"),
        coverage=CoverageLimits(take("min_samples"), take("min_tokens"), take("min_share")),
        override_coverage=take("override_coverage"),
        observe=replace(_OBSERVE, per_channel=take("per_channel")),
        ranges=RangeConfig(take("method"), take("symmetric"), take("percentile")),
    )


@click.command("calibrate")
@click.argument("model", type=_FILE, metavar="BUNDLE|MODEL.onnx")
@calibration_options
@click.option("--tokenizer", type=_FILE, help="Tokenizer's folder, for an .onnx file that takes text.")
@click.option("--max-context", type=int, help="Most tokens of a sample.  [default: the model's own limit]")
@click.option("--outputs", is_flag=True, help="Observe what leaves layers, besides what enters them.")
@click.option("--all-tensors", is_flag=True, help="Observe every float tensor.")
@click.option("--budget", type=int, default=_OBSERVE.budget >> 20, show_default=True, help="MiB of tensors at a time.")
@click.option("--threads", type=int, help="Threads of a run.  [default: all CPUs]")
@click.option("--out", type=_FILE, help="Write the calibration table: JSON.")
@click.option("--html", "html_path", type=_FILE, help="Write the drift report as a self-contained page.")
@click.option("--json", "as_json", is_flag=True, help="Print the drift report and what was used as one JSON document.")
def calibrate_command(
    model: Path, specs: tuple[str, ...], out: Path | None, html_path: Path | None, as_json: bool, **options: Any
) -> None:
    """Run BUNDLE or MODEL.onnx on representative data and find the ranges of what enters its layers.

    Data that leaves out lengths which the traffic has is refused: ranges of short texts say little about long ones.
    """
    config = config_from_options(options)
    observe = replace(
        config.observe,
        outputs=options["outputs"],
        everything=options["all_tensors"],
        budget=options["budget"] << 20,
        threads=options["threads"],
    )
    progress = Progress()
    for path in (out, html_path):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise KilnError(f"{path} cannot be written: expected the name of a file in a folder that exists")
    with progress.stage("open the model"):
        opened = calibration_model_from_path(model, options["tokenizer"], options["max_context"])
    found = calibrate(specs, opened, replace(config, observe=observe), progress)
    if out is not None:
        _write_atomically(out, found.table.to_json())
        progress.note(f"wrote {out}")
    if html_path is not None:
        write_page(html_from_drift(found.drift, model.name, found.coverage.histogram(), _settings(found)), html_path)
    if as_json:
        click.echo(json.dumps({**_settings(found), "drift": json.loads(json_from_drift(found.drift))}))
        return
    click.echo(found.coverage.histogram())
    if found.drift.tensors:
        print_result(table_from_drift(found.drift))
    for name, value in _settings(found).items():
        click.echo(f"{name}: {value}")


def _settings(found: Calibration) -> dict[str, str]:
    observed, table = found.observed, found.table
    peak = "not known on this system" if observed.peak_memory is None else size(int(observed.peak_memory))
    samples = ", ".join(f"{name} {count}" for name, count in observed.samples.items())
    return {
        "model": table.model_sha256,
        "data": f"{table.data_sha256} ({found.data.origin})",
        "method": f"{table.method}, {'symmetric' if table.symmetric else 'asymmetric'}",
        "tensors": str(len(table.tensors)),
        "samples": samples,
        "runs": f"{observed.runs}, in chunks of {observed.chunk} tokens" if observed.chunk else f"{observed.runs}",
        "peak memory": peak,
        **({"warning": "; ".join(table.warnings)} if table.warnings else {}),
    }


def _write_atomically(path: Path, text: str) -> None:
    """`path` holds, at every moment, what it held or all of the text. Raises KilnError."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
                os.fchmod(stream.fileno(), 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise KilnError(f"{path} cannot be written: {error.strerror}; choose another --out") from error
