"""`kiln load`: options and output; the work is in `pipeline.load_test`."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import click

from pipeline.load_test.page import html_from_report
from pipeline.load_test.report import Slo, report_from_run, table_from_report
from pipeline.load_test.run import LoadConfig, Outcome, Run, replay
from pipeline.load_test.targets import BundleTarget, Target, UrlTarget
from pipeline.load_test.trace import (
    Lengths,
    Trace,
    Workload,
    adapted,
    jsonl_from_trace,
    lengths_from_text,
    trace_from_file,
    workload_from_trace,
)
from pipeline.page import write_page
from pipeline.printing import print_result
from pipeline.progress import Progress
from plugins.errors import KilnError

_WORKLOAD = Workload()
_CONFIG = LoadConfig()
_FILE = click.Path(path_type=Path)


class _LengthsType(click.ParamType):
    name = "MEDIAN,SIGMA[,MIN,MAX]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        return value if isinstance(value, Lengths) else lengths_from_text(value)


_LENGTHS = _LengthsType()


def _text(lengths: Lengths) -> str:
    return f"{lengths.median:g},{lengths.sigma:g}"


def workload_options(command: Any) -> Any:
    """Where the requests come from: a trace, distributions fitted to one, or distributions given here."""
    options = [
        click.option("--trace", "trace_file", type=_FILE, help="Replay this trace: JSON Lines, or an Azure CSV."),
        click.option("--fit", "fit_file", type=_FILE, help="Draw from distributions fitted to this trace."),
        click.option(
            "--prompt-tokens",
            "prompt",
            type=_LENGTHS,
            help=f"Lognormal prompt lengths.  [default: {_text(_WORKLOAD.prompt)}]",
        ),
        click.option(
            "--output-tokens",
            "output",
            type=_LENGTHS,
            help=f"Lognormal answer lengths.  [default: {_text(_WORKLOAD.output)}]",
        ),
        click.option("--shared-prefix", type=int, help="Tokens that all prompts begin with, besides their own."),
        click.option("--seed", type=int, default=_CONFIG.seed, show_default=True, help="Of everything drawn."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command("load")
@click.argument("target", metavar="URL|BUNDLE")
@workload_options
@click.option("--requests", type=int, help="Requests to draw, or how many of the trace.  [default: 64, or all]")
@click.option("--rate", type=float, help=f"Requests/s to draw.  [default: {_WORKLOAD.rate:g}, or the fitted one]")
@click.option(
    "--burstiness",
    type=float,
    help="Coefficient of variation of the gaps: 1 Poisson, more comes in bursts, 0 evenly.  [default: 1, or fitted]",
)
@click.option("--speed", type=float, default=1.0, show_default=True, help="Replay the arrivals so many times as fast.")
@click.option("--max-prompt", type=int, help="Cut prompts to so many tokens.")
@click.option("--max-output", type=int, help="Cut answers to so many tokens.")
@click.option("--concurrency", type=int, help="Closed loop: so many users, each waits for its answer.")
@click.option("--warmup", type=int, default=_CONFIG.warmup, show_default=True, help="Requests before, not measured.")
@click.option("--timeout", type=float, default=_CONFIG.timeout, show_default=True, help="Seconds for one request.")
@click.option("--slo-first-token", type=float, help="Goodput: seconds to the first token at most.")
@click.option("--slo-inter-token", type=float, help="Goodput: mean seconds a token of an answer at most.")
@click.option("--api-key-file", type=_FILE, help="File with the server's API key.")
@click.option("--model", help="Model to ask for.  [default: the only one that the server has]")
@click.option("--vocabulary", type=int, help="Random prompts take tokens below this.  [default: the model's, or 1000]")
@click.option("--threads", type=int, help="Threads of a bundle's engine.  [default: all CPUs]")
@click.option("--save-trace", type=_FILE, help="Write what is sent as a JSONL trace.")
@click.option("--html", "html_path", type=_FILE, help="Write a self-contained page with plots.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def load_command(target: str, html_path: Path | None, as_json: bool, **options: Any) -> None:
    """Load an OpenAI-compatible server at URL, or BUNDLE in this process, and measure what users see.

    An interrupt (Ctrl-C) shows what was measured until then; the exit code is then 130.
    """
    progress = Progress()
    slo = Slo(options["slo_first_token"], options["slo_inter_token"])
    config = LoadConfig(options["concurrency"], options["timeout"], options["warmup"], options["seed"])
    trace, workload = trace_from_options(options, progress, timed=config.concurrency is None)
    if options["save_trace"] is not None:
        options["save_trace"].write_text(jsonl_from_trace(trace), encoding="utf-8")
    run, model = asyncio.run(_measured(target, trace, config, options, progress))
    loop = "open" if config.concurrency is None else f"closed, {config.concurrency} users"
    report = report_from_run(run, target=target, model=model, workload=workload, loop=loop, slo=slo)
    if as_json:
        click.echo(report.to_json())
    else:
        print_result(table_from_report(report))
    if html_path is not None:  # last: a page that cannot be written costs no measurement
        write_page(html_from_report(report, run), html_path)
    if run.interrupted:
        raise click.exceptions.Exit(130)


def trace_from_options(options: dict[str, Any], progress: Progress, *, timed: bool) -> tuple[Trace, str]:
    """The requests, and in words where they come from; `timed`: arrival times matter.

    Raises KilnError for options that contradict each other.
    """
    path, fit, count = options["trace_file"], options["fit_file"], options.get("requests")
    names = ("prompt", "output", "rate", "burstiness", "shared_prefix")
    given: dict[str, Any] = {name: options[name] for name in names if options.get(name) is not None}
    if path is not None and (fit is not None or given):
        other = "--fit" if fit is not None else f"--{next(iter(given)).replace('_', '-')}"
        raise KilnError(f"--trace is replayed as it is, so {other} has no meaning beside it; use --fit to draw")
    if path is not None:
        trace, words = trace_from_file(path), str(path)
    else:
        base = _WORKLOAD if fit is None else workload_from_trace(trace_from_file(fit))
        workload = dataclasses.replace(base, **given)
        trace = workload.draw(64 if count is None else count, options["seed"])
        words = workload.lengths() + (f", {workload.arrivals()}" if timed else "")
        if fit is not None:
            progress.note(f"fitted to {fit}: {workload.lengths()}, {workload.arrivals()}")
    trace = adapted(
        trace,
        limit=count,
        speed=options.get("speed", 1.0),
        most_prompt=options.get("max_prompt"),
        most_output=options.get("max_output"),
    )
    return trace, f"{len(trace)} requests, {words}, seed {options['seed']}"


async def _measured(
    where: str, trace: Trace, config: LoadConfig, options: dict[str, Any], progress: Progress
) -> tuple[Run, str]:
    """The run, and the model's name."""
    target = await _target(where, options)
    try:
        with progress.console.status("warm up ...") as status:

            def observe(outcomes: tuple[Outcome, ...]) -> None:
                status.update(_progress_line(outcomes, len(trace)))

            run = await replay(target, trace, config, observe)
    finally:
        await target.close()
    progress.note(_progress_line(run.outcomes, len(trace)))
    return run, target.name


async def _target(where: str, options: dict[str, Any]) -> Target:
    if not where.startswith(("http://", "https://")):
        return BundleTarget.open(Path(where), options["threads"])
    key = None if options["api_key_file"] is None else _key_from_file(options["api_key_file"])
    return await UrlTarget.connect(where, api_key=key, model=options["model"], vocabulary=options["vocabulary"])


def _key_from_file(path: Path) -> str:
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise KilnError(f"no API key can be read from {path}: {error}; expected a file with the key alone") from error
    if not key or not key.isprintable() or " " in key:
        raise KilnError(f"{path} holds no API key; expected one line with the key alone")
    return key


def _progress_line(outcomes: tuple[Outcome, ...], total: int) -> str:
    running = sum(outcome.end is None for outcome in outcomes)
    failed = sum(outcome.error is not None for outcome in outcomes)
    done = len(outcomes) - running - failed
    return f"{done} of {total} answered, {running} running, {failed} failed"
