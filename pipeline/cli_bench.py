"""`kiln bench`: options and output; the work is in `pipeline.bench`."""

from pathlib import Path

import click

from engines.bundle import open_bundle
from pipeline.bench import BenchConfig, bench
from pipeline.bench_table import table_from_report
from pipeline.ledger.recording import ledger_options, record
from pipeline.ledger.records import entry_from_bench
from pipeline.printing import print_result
from pipeline.progress import Progress

_DEFAULTS = BenchConfig()


@click.command("bench")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--threads", type=int, help="Threads of one step.  [default: every CPU this process may use]")
@click.option("--repetitions", type=int, default=_DEFAULTS.repetitions, show_default=True, help="Runs of each figure.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on standard output.")
@ledger_options
def bench_command(
    bundle: Path, threads: int | None, repetitions: int, as_json: bool, ledger: Path, no_ledger: bool
) -> None:
    """Measure BUNDLE on this machine, and each figure against the machine's own limits.

    Language models: prefill, decode, first token, peak memory. Others: latency and throughput.
    """
    progress = Progress()
    report = bench(bundle, BenchConfig(threads=threads, repetitions=repetitions), progress)
    if as_json:
        click.echo(report.to_json())
    else:
        print_result(table_from_report(report))
    if not no_ledger:
        record(ledger, lambda: entry_from_bench(report, open_bundle(bundle).manifest), progress)
