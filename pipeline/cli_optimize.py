"""`kiln optimize`: graph passes over an ONNX file, with a switch, an error and a time for each."""

import json
from pathlib import Path
from typing import Any, get_args

import click
from rich.table import Table

from engines.sku import resolve_sku
from passes.graph import graph_from_path, tidy
from passes.manager import PassReport
from passes.onnx_model import external_files, load_structure, onnx_model_from_path
from passes.prune import PruneStructure
from passes.prune_groups import find_groups
from passes.shapes import infer_shapes
from passes.standard import IoLayout, PassSwitches, PassTarget, Precision, describe_passes, standard_passes
from passes.validate import check_graph
from pipeline.cli_sku import sku_file_option
from pipeline.optimize import OptimizeConfig, optimize
from pipeline.pass_report import json_from_reports, result_of, table_from_reports
from pipeline.printing import print_result
from pipeline.progress import Progress
from pipeline.verify import feeds_from_file
from plugins.errors import KilnError

DEFAULTS = OptimizeConfig()
_NOTES = 3
"""Notes of a pass that are shown without --verbose: what it left alone, and why."""


def switches_from_options(
    only: str | None, enable: tuple[str, ...], disable: tuple[str, ...], options: tuple[str, ...]
) -> PassSwitches:
    """From the command line's texts. Raises KilnError for an option that is not NAME.KEY=VALUE."""
    chosen: dict[str, dict[str, Any]] = {}
    for text in options:
        place, equals, value = text.partition("=")
        name, dot, key = place.partition(".")
        if not (equals and dot and key):
            raise KilnError(f"pass option '{text}' is not NAME.KEY=VALUE, as in fold_constants.size_limit=1048576")
        chosen.setdefault(name, {})[key] = _value(value)
    return PassSwitches(_names(only), _split(enable), _split(disable), chosen)


def _value(text: str) -> Any:
    """JSON, from a file after an @, or else the bare word."""
    if text.startswith("@"):
        try:
            return json.loads(Path(text[1:]).read_text())
        except (OSError, ValueError) as error:
            raise KilnError(f"{text[1:]} cannot be read as JSON: {error}") from error
    try:
        return json.loads(text)
    except ValueError:
        return text


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip()) if text else ()


def _split(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for text in texts for name in _names(text))


def pass_options(command: Any) -> Any:
    """The switches that `kiln optimize` and `build-engine` share."""
    for option in (
        click.option(
            "--inputs",
            type=click.Path(path_type=Path),
            help="An .npz with one set of inputs, for a model that random ones do not suit.",
        ),
        click.option(
            "--pass-option",
            "options",
            multiple=True,
            metavar="NAME.KEY=VALUE",
            help="An option of one pass: JSON, a word, or @FILE.json.",
        ),
        click.option("--only", metavar="NAME,...", help="Run these passes and no others."),
        click.option("--enable", multiple=True, metavar="NAME", help="Run a pass that is off by default."),
        click.option("--disable", multiple=True, metavar="NAME", help="Leave a pass out."),
        click.option(
            "--io-layout",
            type=click.Choice(get_args(IoLayout)),
            default=DEFAULTS.io_layout,
            show_default=True,
            help="Layout of image inputs and outputs; nhwc is how cameras deliver.",
        ),
        click.option("--measure", is_flag=True, help="Time the model before and after each pass."),
        click.option(
            "--verify/--no-verify",
            default=True,
            show_default=True,
            help="Run the model before and after each pass, and undo a pass beyond its tolerance.",
        ),
    ):
        command = option(command)
    return command


@click.command("optimize")
@click.argument("model", type=click.Path(path_type=Path), required=False)
@click.option("--out", type=click.Path(path_type=Path), help="The rewritten model; weights go beside it.")
@click.option("--sku", default="cpu", show_default=True, help="Machine type that the graph is for.")
@sku_file_option
@click.option(
    "--precision",
    type=click.Choice(get_args(Precision)),
    default=DEFAULTS.precision,
    show_default=True,
    help="16 bits around islands of FP32, chosen by ranges that are measured here.",
)
@pass_options
@click.option("--overwrite", is_flag=True, help="Replace OUT where it exists.")
@click.option("--list-groups", is_flag=True, help="List what prune_structure can remove from MODEL, and stop.")
@click.option("--list", "list_passes", is_flag=True, help="List the passes and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
@click.option("--verbose", is_flag=True, help="Show what each pass left alone, and why.")
def optimize_command(
    model: Path | None,
    out: Path | None,
    sku: str,
    sku_file: Path | None,
    precision: Precision,
    io_layout: IoLayout,
    only: str | None,
    enable: tuple[str, ...],
    disable: tuple[str, ...],
    options: tuple[str, ...],
    verify: bool,
    measure: bool,
    inputs: Path | None,
    overwrite: bool,
    list_groups: bool,
    list_passes: bool,
    as_json: bool,
    verbose: bool,
) -> None:
    """Rewrite the graph of MODEL.onnx into OUT.onnx with Kiln's graph passes.

    By default every pass is judged on random inputs, short and long, and undone where it errs more than its kind may.
    """
    if list_passes:
        _print_passes(as_json)
        return
    if model is not None and list_groups:
        _print_groups(model, as_json)
        return
    if model is None or out is None:
        raise click.UsageError("expected MODEL.onnx and --out OUT.onnx (or --list)")
    switches = switches_from_options(only, enable, disable, options)
    standard_passes(PassTarget(), switches)  # refuses unknown names before any work
    _refuse_target(model, out, overwrite)
    config = OptimizeConfig(switches, precision, io_layout, verify, measure)
    progress = Progress(verbose=verbose)
    feeds = feeds_from_file(inputs) if inputs else None
    with progress.stage("read"):
        source = onnx_model_from_path(model)
        machine = resolve_sku(sku, sku_file)

    def observe(report: PassReport) -> None:
        progress.note(f"{report.name}: {result_of(report)} ({report.seconds:.2f} s)")
        shown = report.notes if verbose else report.notes[:_NOTES]
        for note in shown:
            progress.note(f"  {note}")
        if len(shown) < len(report.notes):
            progress.note(f"  and {len(report.notes) - len(shown)} more; see --verbose or --json")

    out.parent.mkdir(parents=True, exist_ok=True)
    with progress.stage("passes"):
        made, reports = optimize(source, out, machine, config, feeds, observe)
    if as_json:
        print(json_from_reports(reports, path=str(made.path), sha256=made.sha256, source_sha256=source.sha256))
    else:
        print_result(table_from_reports(reports))
        print(made.path)


def _refuse_target(model: Path, out: Path, overwrite: bool) -> None:
    if out.is_dir():
        raise KilnError(f"--out {out} is a folder; expected the name of a file to write")
    if out.exists() and model.exists() and out.samefile(model):
        raise KilnError(f"--out {out} is the model itself; choose another name")
    data = out.with_name(f"{out.name}.data")
    if model.is_file() and data.exists():
        for file in external_files(model, load_structure(model)):
            if file.samefile(data):
                raise KilnError(
                    f"--out {out} would replace {data}, which holds the model's own weights; choose another"
                )
    if out.exists() and not overwrite:
        raise KilnError(f"{out} exists; choose another name, or add --overwrite")


def _print_groups(model: Path, as_json: bool) -> None:
    """Of the graph as prune_structure will meet it: after the passes in front of it."""
    graph = graph_from_path(model)
    check_graph(graph)
    for graph_pass in standard_passes(PassTarget(), PassSwitches(enable=(PruneStructure.name,))):
        if graph_pass.name == PruneStructure.name:
            break
        infer_shapes(graph)
        graph_pass.call(graph)
        tidy(graph)
    groups, reasons = find_groups(graph)
    if as_json:
        rows = [{"name": group.name, "kind": group.kind, "units": group.units} for group in groups]
        print(json.dumps({"groups": rows, "cannot_be_pruned": reasons}))
        return
    table = Table()
    for heading in ("group", "kind", "units"):
        table.add_column(heading, overflow="fold")
    for group in groups:
        table.add_row(group.name, group.kind, str(group.units))
    print_result(table)


def _print_passes(as_json: bool) -> None:
    rows = describe_passes(PassTarget())
    if as_json:
        print(json.dumps([{"name": name, "effect": effect, "default": default} for name, effect, default in rows]))
        return
    table = Table()
    for heading in ("pass", "effect", "on by default, CPU"):
        table.add_column(heading)
    for name, effect, default in rows:
        table.add_row(name, effect, "yes" if default else "no")
    print_result(table)
