"""The command line: `build-engine`, and the `kiln` group.

Commands parse options, call one function of the pipeline and print. Results go to standard output,
progress to standard error. Exit codes: 0 done, 1 a comparison beyond its tolerance, 2 bad input, 3 an engine that the
accuracy gate refused, 130 interrupted; nightly has its own.
"""

import json
import os
import sys
import warnings
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from engines.bundle import EngineBundle, open_bundle
from engines.manifest import PassRecord
from engines.sku import sku_table
from pipeline.cli_ablate import ablate_command
from pipeline.cli_bench import bench_command
from pipeline.cli_bisect import bisect_command
from pipeline.cli_calibrate import calibrate_command
from pipeline.cli_capi import capi_group
from pipeline.cli_compare import compare_command
from pipeline.cli_deploy import deploy_group
from pipeline.cli_doctor import doctor_command
from pipeline.cli_export import export_repo_group
from pipeline.cli_ledger import explain_command, ledger_group
from pipeline.cli_load import load_command
from pipeline.cli_nightly import nightly_group
from pipeline.cli_optimize import optimize_command, pass_options, switches_from_options
from pipeline.cli_profile import profile_command
from pipeline.cli_quantize import quantize_from_options, quantize_options
from pipeline.cli_registry import registry_group
from pipeline.cli_run import run_bundle_command
from pipeline.cli_serve import serve_command
from pipeline.cli_sku import sku_file_option, sku_group
from pipeline.cli_tensorrt import tensorrt_group
from pipeline.cli_tune import tune_command
from pipeline.config import PRECISIONS, BuildConfig
from pipeline.forecast import size
from pipeline.gate.report import GateFailedError, tables_from_report
from pipeline.ledger.recording import ledger_options, record
from pipeline.ledger.records import entry_from_build
from pipeline.printing import print_result
from pipeline.progress import Progress
from plugins.errors import KilnError
from plugins.paged_attention.schema import EXPORT_DTYPES

DEFAULTS = BuildConfig()


def run_command(command: click.Command) -> None:
    """Run a command as a program: what users can mend is one message and exit code 2, never a traceback."""
    code = 0
    try:  # not click's own main: it ends with code 1 for an interrupt and for a closed pipe
        with command.make_context(Path(sys.argv[0]).name, sys.argv[1:]) as context:
            command.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as ending:
        code = ending.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except GateFailedError as error:
        Console(file=sys.stderr, highlight=False).print(tables_from_report(error.report))
        print(f"error: {error}; nothing was published", file=sys.stderr)
        code = 3
    except KilnError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        code = 141
    except OSError as error:  # the disk is full, a file may not be read: the system's own words say it
        print(f"error: {error}", file=sys.stderr)
        code = 2
    raise SystemExit(code)


@click.command("build-engine")
@click.argument("model")
@click.option(
    "--sku",
    "skus",
    multiple=True,
    default=("cpu",),
    show_default=True,
    metavar="SKU",
    help=f"Machine type, may be given several times: cpu, {', '.join(sku_table())}.",
)
@sku_file_option
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="What the engine computes in.  [default: fp32 for a CPU, fp16 for a GPU]",
)
@click.option(
    "--kv-dtype",
    type=click.Choice(EXPORT_DTYPES),
    help="Storage type of the KV cache; 16 bits halve its memory and round keys and values.  [default: float32 for a "
    "CPU, the precision's own for a GPU]",
)
@click.option("--block-size", type=int, default=DEFAULTS.block_size, show_default=True, help="Tokens per cache block.")
@click.option("--max-context", type=int, help="Longest sequence in tokens.  [default: the model's own]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The bundle's folder; with several SKUs the folder that gets one bundle each.  [default: bundles/NAME-SKU]",
)
@pass_options
@quantize_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
@click.option("--verbose", is_flag=True, help="Show details of every stage, and warnings.")
@ledger_options
@click.version_option(package_name="kiln-engine")
def build_engine_command(
    model: str,
    skus: tuple[str, ...],
    as_json: bool,
    verbose: bool,
    only: str | None,
    enable: tuple[str, ...],
    disable: tuple[str, ...],
    options: tuple[str, ...],
    verify: bool,
    measure: bool,
    ledger: Path,
    no_ledger: bool,
    **build_options: Any,
) -> None:
    """Build a verified engine bundle of MODEL for each SKU.

    MODEL is a Hugging Face folder or hub id, a .gguf or .onnx file, package://PACKAGE/FILE, module:callable
    returning (torch module, example inputs), or a short name: smollm2, minilm, efficientnet-lite0.
    """
    from pipeline.build import build

    if not verbose:
        warnings.simplefilter("ignore")
    quantize = quantize_from_options(build_options)
    config = BuildConfig(
        quantize=quantize,
        **build_options,
        passes=switches_from_options(only, enable, disable, options),
        verify_passes=verify,
        measure_passes=measure,
    )
    progress = Progress(verbose=verbose)
    with redirect_stdout(sys.stderr):  # a user's model may print
        built = build(model, skus, config, progress)
    if as_json:
        document = {
            "bundles": [{**_bundle_record(item.bundle), "forecast": item.forecast.to_dict()} for item in built],
            "seconds": progress.seconds,
        }
        print(json.dumps(document))
    else:
        for item in built:
            print(item.bundle.path)
    for item in () if no_ledger else built:
        record(ledger, partial(entry_from_build, item.bundle, progress.seconds), progress)


@click.group("kiln", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kiln-engine")
def kiln_group() -> None:
    """Inspect, run, compare and measure engine bundles. Build them with build-engine."""


@kiln_group.command("inspect")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def inspect_command(bundle: Path, as_json: bool) -> None:
    """Verify BUNDLE and show what is in it."""
    opened = open_bundle(bundle)
    if as_json:
        print(opened.manifest.model_dump_json(indent=2))
    else:
        print_result(_bundle_table(opened))


kiln_group.add_command(run_bundle_command)
kiln_group.add_command(optimize_command)
kiln_group.add_command(compare_command)
kiln_group.add_command(deploy_group)
kiln_group.add_command(doctor_command)
kiln_group.add_command(ablate_command)
kiln_group.add_command(bench_command)
kiln_group.add_command(bisect_command)
kiln_group.add_command(calibrate_command)
kiln_group.add_command(capi_group)
kiln_group.add_command(explain_command)
kiln_group.add_command(export_repo_group)
kiln_group.add_command(ledger_group)
kiln_group.add_command(load_command)
kiln_group.add_command(nightly_group)
kiln_group.add_command(profile_command)
kiln_group.add_command(registry_group)
kiln_group.add_command(serve_command)
kiln_group.add_command(sku_group)
kiln_group.add_command(tensorrt_group)
kiln_group.add_command(tune_command)


def _bundle_record(bundle: EngineBundle) -> dict[str, Any]:
    manifest = bundle.manifest
    return {
        "path": str(bundle.path),
        "sha256": bundle.sha256,
        "sku": manifest.sku.name,
        "precision": manifest.precision,
        "checks": [check.model_dump() for check in manifest.checks],
    }


def _pass_line(record: PassRecord) -> str:
    if record.rolled_back is not None:
        return f"rolled back: {record.rolled_back}"
    if not record.changed:
        return "changed nothing"
    error = "" if record.relative_error is None else f", relative error {record.relative_error:.1e}"
    return f"{record.rewrites} rewrites{error}"


def _bundle_table(bundle: EngineBundle) -> Table:
    manifest = bundle.manifest
    table = Table(title=f"{bundle.path}: verified", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows = {
        "identity": bundle.sha256,
        "model": f"{manifest.model.source} ({manifest.model.architecture}, {manifest.model.parameters:,} parameters)",
        "model digest": manifest.model.sha256,
        "SKU": f"{manifest.sku.name} ({manifest.sku.arch}); needs {', '.join(manifest.sku.cpu_features) or 'nothing'}",
        "backend": f"{manifest.backend.name} {manifest.backend.version}, {manifest.backend.provider}",
        "precision": manifest.precision,
        "built": f"{manifest.created} by Kiln {manifest.kiln_version}",
    }
    if manifest.tensorrt is not None:
        rows["plan"] = manifest.tensorrt.sentence()
    if manifest.parent is not None:
        rows["parent"] = manifest.parent
    if manifest.serving is not None:
        rows["serving"] = manifest.serving.sentence()
    if manifest.quantization is not None:
        rows["quantised"] = manifest.quantization.sentence()
    if manifest.decoder is not None:
        kv = manifest.decoder.kv
        types = " and ".join(dict.fromkeys(kv.dtypes))
        rows["KV cache"] = (
            f"{len(kv.layers)} layers, {types}, blocks of {kv.block_size}, {size(kv.bytes_per_token)} per token"
        )
        rows["context"] = f"{manifest.decoder.max_context} tokens, vocabulary {manifest.decoder.vocab_size}"
    if manifest.memory is not None:
        rows["memory"] = manifest.memory.sentence()
    caches = ("key_cache", "value_cache", "key_scale", "value_scale")
    for title, tensors in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
        rows[title] = "\n".join(
            f"{tensor.name} {tensor.dtype} [{', '.join(map(str, tensor.shape))}]"
            for tensor in tensors
            if not tensor.name.startswith(caches)
        )
    if manifest.unverified:
        rows["not verified"] = "\n".join(manifest.unverified) + "\n(kiln tune does, on a machine of the SKU's type)"
    for graph_pass in manifest.passes:
        rows[f"pass {graph_pass.name}"] = _pass_line(graph_pass)
    for check in manifest.checks:
        rows[check.name] = check.sentence()
    rows["files"] = "\n".join(f"{name}  {size(record.bytes)}" for name, record in manifest.files.items())
    for name, text in rows.items():
        table.add_row(name, text)
    return table
