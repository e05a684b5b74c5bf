"""`kiln sku`: the table of machine types, which of them this machine is, and what a model would do on each."""

import json
from pathlib import Path
from typing import Any, get_args

import click
from rich.table import Table

from engines.sku import Precision, Sku, resolve_sku, skus_from_file
from engines.sku_detect import QUERY, Match, NoDriverError, gpus_from_nvidia_smi, match_gpu, own_gpus, toml_from_gpu
from pipeline.forecast import size
from pipeline.page import write_page
from pipeline.printing import print_result
from pipeline.progress import Progress
from pipeline.sku_forecast_report import html_from_forecasts, table_from_forecasts
from plugins.errors import KilnError
from plugins.paged_attention.schema import EXPORT_DTYPES

sku_file_option = click.option(
    "--sku-file", type=click.Path(path_type=Path), help="A TOML file with more machine types; docs/skus.md shows one."
)
_SHOWN_PEAKS: tuple[Precision, ...] = ("fp32", "fp16", "int8", "fp8", "fp4")


@click.group("sku")
def sku_group() -> None:
    """Show the machine types that Kiln knows, find this machine's, and forecast a model on them."""


@sku_group.command("list")
@sku_file_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def list_command(sku_file: Path | None, as_json: bool) -> None:
    """List all SKUs with their numbers. Peaks are dense, in 10^12 operations/s."""
    table = skus_from_file(sku_file)
    if as_json:
        print(json.dumps([sku.model_dump() for sku in table.values()]))
    else:
        print_result(_table_of_skus(list(table.values())))


@sku_group.command("show")
@click.argument("name")
@sku_file_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def show_command(name: str, sku_file: Path | None, as_json: bool) -> None:
    """Show everything about one SKU, with the source of its numbers."""
    sku = resolve_sku(name, sku_file)
    if as_json:
        print(sku.model_dump_json(indent=2))
        return
    table = Table(title=f"{sku.name}: {sku.title or sku.arch}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, text in _rows_of_sku(sku).items():
        table.add_row(key, text)
    print_result(table)


@sku_group.command("detect")
@sku_file_option
@click.option(
    "--nvidia-smi",
    "answer",
    type=click.Path(path_type=Path),
    help=f"Judge another machine by a file with what this printed there: {' '.join(QUERY)}",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def detect_command(sku_file: Path | None, answer: Path | None, as_json: bool) -> None:
    """Find the SKU of this machine's CPU and of each of its GPUs."""
    table = skus_from_file(sku_file)
    missing = ""
    if answer is not None:
        matches = [match_gpu(gpu, table) for gpu in gpus_from_nvidia_smi(_text(answer))]
    else:
        try:
            matches = [match_gpu(gpu, table) for gpu in own_gpus()]
        except NoDriverError as error:
            matches, missing = [], str(error)
    cpu, problem = _cpu(sku_file) if answer is None else (None, "")
    if as_json:
        print(json.dumps({"cpu": cpu.name if cpu else None, "gpus": [_record(match) for match in matches]}))
    else:
        if answer is None:
            print(f"cpu: {cpu.name} ({cpu.arch})" if cpu else f"cpu: none; {problem}")
        for match in matches:
            print(_line(match))
        if not matches:
            print(f"gpu: none; {missing or 'nvidia-smi lists none'}")
        for match in matches:
            entry = None if match.sku else toml_from_gpu(match.gpu, table)
            if entry:
                print(f"\nTo build for GPU {match.gpu.index}, complete this and give it as --sku-file:\n\n{entry}")
    if not cpu and not any(match.sku for match in matches):
        raise click.exceptions.Exit(1)


@sku_group.command("forecast")
@click.argument("model")
@click.option("--sku", "skus", multiple=True, metavar="SKU", help="May be given several times.  [default: every GPU]")
@sku_file_option
@click.option("--precision", type=click.Choice(get_args(Precision)), default="fp32", show_default=True)
@click.option("--kv-dtype", type=click.Choice(EXPORT_DTYPES), default="float32", show_default=True)
@click.option("--max-context", type=int, help="Longest sequence in tokens.  [default: the model's own]")
@click.option("--html", "html_path", type=click.Path(path_type=Path), help="Write a self-contained page with plots.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def forecast_command(
    model: str, skus: tuple[str, ...], sku_file: Path | None, html_path: Path | None, as_json: bool, **options: Any
) -> None:
    """Say on which SKUs MODEL fits, the largest batch, and the speed that no engine there can exceed.

    MODEL is a bundle, or what build-engine takes. Rates come from the table's peaks and not from measurements; they are
    bounds, to compare machines before one is bought, and to see what limits.
    """
    from pipeline.sku_forecast import SizeOptions, forecast_for_skus

    table = skus_from_file(sku_file)
    chosen = [resolve_sku(name, sku_file) for name in skus] or [sku for sku in table.values() if not sku.is_cpu]
    forecasts = forecast_for_skus(model, chosen, SizeOptions(**options), Progress())
    if as_json:
        print(json.dumps([forecast.to_dict() for forecast in forecasts]))
    else:
        print_result(table_from_forecasts(model, forecasts))
    if html_path is not None:
        write_page(html_from_forecasts(model, forecasts), html_path)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KilnError(f"cannot read {path}: {error}; expected what {QUERY[0]} printed") from error


def _cpu(sku_file: Path | None) -> tuple[Sku | None, str]:
    try:
        return resolve_sku("cpu", sku_file), ""
    except KilnError as error:
        return None, str(error)


def _record(match: Match) -> dict[str, Any]:
    gpu = match.gpu
    return {
        "index": gpu.index,
        "name": gpu.name,
        "arch": gpu.arch,
        "memory": gpu.memory,
        "driver": gpu.driver,
        "sku": match.sku.name if match.sku else None,
        "reason": match.reason,
    }


def _line(match: Match) -> str:
    gpu = match.gpu
    details = [gpu.name, gpu.arch, None if gpu.memory is None else size(gpu.memory)]
    known = ", ".join(detail for detail in details if detail)
    return f"gpu {gpu.index}: {match.sku.name if match.sku else 'no SKU'} ({known})" + (
        f"; {match.reason}" if match.reason else ""
    )


def _table_of_skus(skus: list[Sku]) -> Table:
    table = Table()
    for heading in ("SKU", "machine", "arch", "memory", "GB/s", *_SHOWN_PEAKS, "backend", "attention plugin"):
        table.add_column(heading, justify="right" if heading in ("memory", "GB/s", *_SHOWN_PEAKS) else "left")
    for sku in skus:
        table.add_row(
            sku.name,
            sku.title,
            sku.arch,
            size(sku.memory) if sku.memory else "",
            f"{sku.bandwidth / 1e9:,.0f}" if sku.bandwidth else "",
            *(f"{sku.peak[name] / 1e12:,.5g}" if name in sku.peak else "" for name in _SHOWN_PEAKS),
            backend_text(sku),
            ", ".join(sku.plugin_architectures) or "no",
        )
    return table


def backend_text(sku: Sku) -> str:
    """The default backend for people."""
    return sku.backend if sku.provider is None else sku.provider.removesuffix("ExecutionProvider")


def _rows_of_sku(sku: Sku) -> dict[str, str]:
    peaks = (f"{name} {rate / 1e12:,.5g}" for name, rate in sku.peak.items())
    unknown = [name for name in sku.precisions if name not in sku.peak]
    rows = {
        "architecture": f"{sku.generation} {sku.arch}".strip(),
        "memory": f"{size(sku.memory)} ({sku.memory:,} bytes)" if sku.memory else "the machine's own",
        "bandwidth": f"{sku.bandwidth / 1e9:,.0f} GB/s" if sku.bandwidth else "unknown",
        "dense peak, 10^12/s": ", ".join(peaks) or "unknown",
        "peak unknown": ", ".join(unknown) if sku.peak else "",
        "precisions": ", ".join(sku.precisions),
        "backend": " ".join(part for part in (sku.backend, sku.provider) if part),
        "its options": ", ".join(f"{key}={value}" for key, value in sku.options.items()),
        "attention plugin": ", ".join(sku.plugin_architectures) or "does not run there",
        "CPU features": ", ".join(sku.cpu_features),
        "names": ", ".join(sku.names),
        "source": sku.source,
    }
    return {key: text for key, text in rows.items() if text}
