"""`kiln ledger` and `kiln explain`: options and output; the work is in `pipeline.ledger`."""

import json
from pathlib import Path
from typing import get_args

import click

from engines.bundle import MANIFEST, open_bundle
from pipeline.ledger.entry import Entry, Kind
from pipeline.ledger.explain import document_from_explanation, explain, tables_from_explanation
from pipeline.ledger.store import Ledger, default_path
from pipeline.ledger.views import (
    bars_of_metric,
    difference_document,
    entries_with,
    entry_document,
    flags,
    judged,
    page_of_metric,
    regressions,
    require_comparable,
    table_of_difference,
    table_of_entries,
    table_of_entry,
)
from pipeline.page import write_page
from pipeline.printing import print_result
from plugins.errors import KilnError

_FILE = click.Path(path_type=Path)
_ledger_option = click.option(
    "--ledger",
    type=_FILE,
    default=default_path,
    show_default="$XDG_STATE_HOME/kiln/ledger.sqlite",
    help="The ledger's file.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")


@click.group("ledger")
def ledger_group() -> None:
    """What was built, compared and benchmarked, and what each change gave.

    An entry is its number, or a bundle's path or identity, which mean its newest entry.
    """


@ledger_group.command("list")
@_ledger_option
@click.option("--kind", type=click.Choice(get_args(Kind)))
@click.option("--model", help="Name of a model.")
@click.option("--limit", type=click.IntRange(min=1), default=30, show_default=True)
@_json_option
def list_command(ledger: Path, kind: Kind | None, model: str | None, limit: int, as_json: bool) -> None:
    """List entries, newest first, with what changed and what got worse."""
    with Ledger(ledger, create=False) as opened:
        entries = opened.entries(kind=kind, name=model, limit=limit)
        if as_json:
            documents = [{**entry_document(entry), "worse": flags(opened, entry)} for entry in entries]
            click.echo(json.dumps([{k: v for k, v in one.items() if k != "document"} for one in documents]))
        else:
            print_result(table_of_entries(opened, entries))


@ledger_group.command("show")
@click.argument("entry")
@_ledger_option
@_json_option
def show_command(entry: str, ledger: Path, as_json: bool) -> None:
    """Show ENTRY: facts, digests and figures; with --json also the whole report."""
    with Ledger(ledger, create=False) as opened:
        found = _entry(opened, entry)
    if as_json:
        click.echo(json.dumps(entry_document(found)))
    else:
        print_result(table_of_entry(found))


@ledger_group.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--kind", type=click.Choice(get_args(Kind)), help="Of bundles' entries.  [default: benchmark, or build]")
@_ledger_option
@_json_option
def diff_command(a: str, b: str, kind: Kind | None, ledger: Path, as_json: bool) -> None:
    """Compare entry B with entry A over all runs like each. Exit code 1: a figure regressed."""
    with Ledger(ledger, create=False) as opened:
        first, second = _entry(opened, a, kind), _entry(opened, b, kind)
        require_comparable(first, second)
        figures = judged(opened, first, second)
    if as_json:
        click.echo(json.dumps(difference_document(first, second, figures)))
    else:
        print_result(table_of_difference(first, second, figures))
    if regressions(figures):
        raise click.exceptions.Exit(1)


@ledger_group.command("plot")
@click.argument("metric")
@click.option("--model", help="Name of a model.")
@click.option("--html", "html_path", type=_FILE, help="Write a self-contained page with a plot.")
@_ledger_option
def plot_command(metric: str, model: str | None, html_path: Path | None, ledger: Path) -> None:
    """Show METRIC, a figure such as decode_batch_1, over time."""
    with Ledger(ledger, create=False) as opened:
        entries = entries_with(opened, metric, model)
        print_result(bars_of_metric(entries, metric))
        if html_path is not None:
            write_page(page_of_metric(entries, metric, opened), html_path)


@click.command("explain")
@click.argument("bundle", type=_FILE)
@_ledger_option
@_json_option
def explain_command(bundle: Path, ledger: Path, as_json: bool) -> None:
    """Tell step by step what each optimisation of BUNDLE gave in latency, memory and accuracy."""
    opened = open_bundle(bundle)
    if ledger.is_file():
        with Ledger(ledger, create=False) as book:
            explanation = explain(opened, book)
    else:
        explanation = explain(opened, None)
    if as_json:
        click.echo(json.dumps(document_from_explanation(explanation)))
    else:
        print_result(tables_from_explanation(explanation))


def _entry(ledger: Ledger, text: str, kind: Kind | None = None) -> Entry:
    """By number, by a bundle's path, or by the beginning of its identity."""
    if text.isdecimal() and len(text) < 12:
        return ledger.entry(int(text))
    subject = open_bundle(Path(text)).sha256 if (Path(text) / MANIFEST).is_file() else text.lower()
    known = [entry for entry in ledger.entries(kind=kind) if entry.subject and entry.subject.startswith(subject)]
    for wanted in ("benchmark", "build", None):
        for entry in known:
            if wanted in (entry.kind, None):
                return entry
    raise KilnError(
        f"the ledger {ledger.path} has no {kind or 'entry'} of '{text}'; give a number, a bundle's folder or the "
        "beginning of its identity, as kiln ledger list shows them"
    )
