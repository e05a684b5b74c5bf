"""`kiln nightly`: options, reports and exit codes; the work is in `pipeline.nightly`."""

import shutil
import socket
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from pipeline.ledger.nightly import entries_from_nightly
from pipeline.ledger.recording import ledger_options, record
from pipeline.nightly.config import NightlyConfig, config_from_toml
from pipeline.nightly.executor import LocalExecutor
from pipeline.nightly.fingerprint import Machine, digest_of
from pipeline.nightly.journal import AlreadyRunningError, Journal, only_run
from pipeline.nightly.page import html_from_nightly
from pipeline.nightly.ray_executor import RayExecutor
from pipeline.nightly.report import NightlyReport, junit_from_report
from pipeline.nightly.run import Nightly
from pipeline.page import write_page
from pipeline.printing import print_result
from pipeline.progress import Progress
from pipeline.ray_cluster import connected
from pipeline.registry.keys import signing_key_from_pem, trusted_keys_from_file
from pipeline.registry.registry import Registry
from pipeline.registry.store import Store

JOURNAL = "journal.jsonl"
BUSY = 75
"""EX_TEMPFAIL of sysexits.h: another run works in the same folder."""


class _RunByDefault(click.Group):
    """`kiln nightly CONFIG.toml` runs; `kiln nightly verify CONFIG.toml` is a command of its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


def _options(command: Any) -> Any:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON document."),
        click.option("--verbose", is_flag=True, help="Show what child processes print."),
        click.option(
            "--ray",
            "address",
            help="Run each SKU's tasks on a node of this Ray cluster (HOST:6379, auto) with its label.",
        ),
        click.option(
            "--reports", type=click.Path(path_type=Path), help="Folder of reports.  [default: WORK/reports/RUN]"
        ),
    ):
        command = option(command)
    return click.argument("config", type=click.Path(path_type=Path))(ledger_options(command))


@click.group("nightly", cls=_RunByDefault, context_settings={"help_option_names": ["-h", "--help"]})
def nightly_group() -> None:
    """Rebuild what changed, judge it against stable, and promote it to canary: kiln nightly CONFIG.toml.

    \b
    Exit codes, for cron:
      0   all is promoted, unchanged, or waits for a machine that can judge it
      2   the configuration, a key or the registry's URL is wrong
      3   a gate held a candidate back; the report says which
      4   a job could not be done: a build or gate crashed, or the registry failed
      75  another run works in the same folder
      130 interrupted; the next run goes on
    """


@nightly_group.command("run")
@_options
@click.option("--force", is_flag=True, help="Build what has not changed, too.")
def run_command(config: Path, force: bool, **options: Any) -> None:
    """Build, publish, judge, promote. A run that was killed is continued."""
    _perform(config, lambda nightly: replace(nightly, force=force).rebuild(), **options)


@nightly_group.command("verify")
@_options
def verify_command(config: Path, **options: Any) -> None:
    """Judge candidates that no machine could execute so far and this one can."""
    _perform(config, Nightly.verify, **options)


def _perform(
    path: Path,
    work: Callable[[Nightly], NightlyReport],
    reports: Path | None,
    verbose: bool,
    address: str | None,
    as_json: bool,
    ledger: Path,
    no_ledger: bool,
) -> None:
    config, progress = config_from_toml(path), Progress(verbose=verbose)
    try:
        with only_run(config.work), nullcontext() if address is None else connected(address):
            nightly = nightly_from_config(config, progress, address is not None)
            report = work(nightly)
            folder = reports or config.work / "reports" / report.run
            report = write_reports(report, folder)
            nightly.journal.end()
    except AlreadyRunningError as error:
        click.echo(f"error: {error}", err=True)
        raise click.exceptions.Exit(BUSY) from error
    progress.note(f"reports in {folder}")
    for entry in () if no_ledger else entries_from_nightly(report):
        record(ledger, partial(replace, entry), progress)
    if as_json:
        click.echo(report.to_json())
    else:
        print_result(_table(report))
    raise click.exceptions.Exit(report.exit_code)


def nightly_from_config(config: NightlyConfig, progress: Progress, on_ray: bool = False) -> Nightly:
    """What a run needs; on Ray this process is connected to the cluster. Raises KilnError for wrong keys and URLs."""
    machine = Machine()
    owner = f"nightly-{socket.gethostname()}-{digest_of(str(config.work.resolve()))[:12]}"
    registry = Registry(
        Store(config.registry, config.single_writer),
        trusted_keys_from_file(config.trust),
        signing_key_from_pem(config.key),
        owner,
    )
    journal = Journal(config.work / JOURNAL)
    if not on_ray:
        return Nightly(config, registry, LocalExecutor(), machine, journal, progress)
    skus = tuple(sku for _, sku in config.jobs)
    executor = RayExecutor(config.registry, config.single_writer, skus, owner)
    return Nightly(config, registry, executor, machine, journal, progress, machines=executor.machine)


def write_reports(report: NightlyReport, folder: Path) -> NightlyReport:
    """Pages of jobs are copied beside the report's; the report with their new places."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs = []
    for job in report.jobs:
        places = {}
        for name, path in job.attachments.items():
            places[name] = f"{job.model}-{job.sku}-{name}.html"
            shutil.copyfile(path, folder / places[name])
        jobs.append(replace(job, attachments=places))
    report = replace(report, jobs=tuple(jobs))
    (folder / "report.json").write_text(report.to_json())
    (folder / "junit.xml").write_text(junit_from_report(report), encoding="utf-8")
    write_page(html_from_nightly(report), folder / "report.html")
    return report


def _table(report: NightlyReport) -> Table:
    table = Table(title=f"Nightly {report.run}", title_justify="left")
    for heading in ("model", "SKU", "result", "version", "stable", "changed since stable", "what was found"):
        table.add_column(heading, justify="right" if heading in ("version", "stable") else "left")
    for job in report.jobs:
        numbers = ["" if number is None else str(number) for number in (job.version, job.stable)]
        changes = "\n".join(f"{name}: {change}" for name, change in job.changes.items())
        table.add_row(job.model, job.sku, job.status, *numbers, changes, job.text)
    return table
