"""`kiln tune`: options and output; the work is in `pipeline.tune`."""

from pathlib import Path
from typing import Any

import click

from engines.runtime.sequence import LANES
from pipeline.cli_load import trace_from_options, workload_options
from pipeline.load_test.report import Slo
from pipeline.load_test.trace import Lengths
from pipeline.page import write_page
from pipeline.printing import print_result
from pipeline.progress import Progress
from pipeline.tune import TuneConfig, tune
from pipeline.tune.config import ON_CPU, ON_GPU
from pipeline.tune.report import html_from_tuning, json_from_tuning, table_from_tuning
from pipeline.tune.search import OBJECTIVES
from plugins.errors import KilnError

_DEFAULTS = TuneConfig()
_PROMPT, _OUTPUT = Lengths(128), Lengths(32)
"""Lengths that do not vary: the differences are those of the settings."""


def _sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise KilnError(f"sizes are {text!r}; expected whole numbers as in 256,512") from error


def _joined(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))


@click.command("tune")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The new bundle's folder.  [default: BUNDLE-tuned]")
@click.option("--dry-run", is_flag=True, help="Measure and report, but write no bundle.")
@click.option("--objective", type=click.Choice(OBJECTIVES), default=_DEFAULTS.objective, show_default=True)
@click.option("--slo-first-token", type=float, help="Goodput: seconds to the first token at most.")
@click.option("--slo-inter-token", type=float, help="Goodput: mean seconds a token of an answer at most.")
@click.option("--slo-latency", type=float, help="Goodput of a model without a KV cache: seconds of a batch at most.")
@click.option("--budget", type=float, default=_DEFAULTS.budget, show_default=True, help="Seconds to measure at most.")
@click.option(
    "--repetitions", type=int, default=_DEFAULTS.repetitions, show_default=True, help="Measurements of a setting."
)
@click.option("--window", type=float, default=_DEFAULTS.window, show_default=True, help="Least seconds of each.")
@click.option(
    "--max-batch",
    type=int,
    help=f"Largest batch to try.  [default: {ON_CPU.max_batch}; on a GPU {ON_GPU.max_batch}]",
)
@click.option(
    "--chunk-sizes",
    help=f"Tokens of a step.  [default: {_joined(ON_CPU.chunk_sizes)}; on a GPU {_joined(ON_GPU.chunk_sizes)}]",
)
@click.option(
    "--block-sizes",
    help=f"Tokens of a block.  [default: {_joined(ON_CPU.block_sizes)}; on a GPU the bundle's own]",
)
@click.option("--kv-blocks", type=int, help="Cache blocks, of the bundle's own size.  [default: what fits]")
@click.option("--length", type=int, help="Input length of a model without a KV cache.  [default: its smallest]")
@workload_options
@click.option(
    "--lane",
    type=click.Choice(LANES),
    help="Lane of drawn requests.  [default: batch for throughput, interactive for goodput]",
)
@click.option("--threads", type=int, help="Threads of a step.  [default: all CPUs]")
@click.option("--html", "html_path", type=click.Path(path_type=Path), help="Write a self-contained page with plots.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def tune_command(
    bundle: Path,
    out: Path | None,
    dry_run: bool,
    chunk_sizes: str | None,
    block_sizes: str | None,
    html_path: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure how BUNDLE is served best on this machine, and write a new bundle that is served so.

    Language models: requests that run at a time, tokens of a step and of a cache block. Others: the batch size. The
    new bundle names its parent; weights are linked, not copied.
    """
    config = TuneConfig(
        objective=options["objective"],
        slo=Slo(options["slo_first_token"], options["slo_inter_token"]),
        most_latency=options["slo_latency"],
        budget=options["budget"],
        repetitions=options["repetitions"],
        window=options["window"],
        max_batch=options["max_batch"],
        chunk_sizes=_sizes(chunk_sizes),
        block_sizes=_sizes(block_sizes),
        kv_blocks=options["kv_blocks"],
        length=options["length"],
        threads=options["threads"],
        seed=options["seed"],
    )
    progress = Progress()
    if options["trace_file"] is None and options["fit_file"] is None:
        options["prompt"], options["output"] = options["prompt"] or _PROMPT, options["output"] or _OUTPUT
    trace, workload = trace_from_options(options, progress, timed=False)
    if options["trace_file"] is None:
        lane = options["lane"] or ("interactive" if config.objective == "goodput" else "batch")
        trace = tuple(request.model_copy(update={"lane": lane}) for request in trace)
        workload += f", lane {lane}"
    elif options["lane"] is not None:
        raise KilnError("--trace names its own lanes, so --lane has no meaning beside it")
    out = out or bundle.resolve().with_name(f"{bundle.resolve().name}-tuned")
    tuning = tune(bundle, out, trace, workload, config, progress)
    if not as_json:
        print_result(table_from_tuning(tuning))
    written = None if dry_run else tuning.write(out)
    if as_json:
        click.echo(json_from_tuning(tuning, written))
    elif written is not None:
        progress.note(f"wrote {written.path}")
    if html_path is not None:
        write_page(html_from_tuning(tuning), html_path)
