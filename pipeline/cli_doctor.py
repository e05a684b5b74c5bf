"""`kiln doctor`: options, output and exit code; the work is in `pipeline.doctor` and `pipeline.doctor_facts`."""

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Group
from rich.table import Table

from engines.sku import resolve_sku, skus_from_file
from pipeline.cli_sku import sku_file_option
from pipeline.doctor import Need, Verdict, commands, judge, own_skus
from pipeline.doctor_facts import Machine, inspect_machine
from pipeline.printing import print_result
from pipeline.progress import Progress


@click.command("doctor")
@click.option("--sku", "names", multiple=True, metavar="SKU", help="Judge these only; the exit code is about them.")
@sku_file_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def doctor_command(names: tuple[str, ...], sku_file: Path | None, as_json: bool) -> None:
    """Show what is installed here, what is missing for which SKU, and the commands that install it.

    Exit code 0: engines for every SKU that --sku names can be built and run here. 1: not for all of them. Without
    --sku all SKUs are judged and the exit code is 0.
    """
    table = skus_from_file(sku_file)
    chosen = [resolve_sku(name, sku_file) for name in names] or list(table.values())
    with Progress().stage("look at this machine"):
        machine = inspect_machine()
    verdicts = [judge(sku, machine) for sku in chosen]
    own = own_skus(list(table.values()), machine)
    if as_json:
        print(json.dumps(_document(machine, verdicts, own)))
    else:
        _print(machine, verdicts, own, explain=bool(names))
    if names and not all(verdict.can("build") and verdict.can("run") for verdict in verdicts):
        raise click.exceptions.Exit(1)


def _document(machine: Machine, verdicts: list[Verdict], own: list[str]) -> dict[str, object]:
    return {
        "machine": machine.description,
        "gpus": [asdict(gpu) for gpu in machine.gpus],
        "own_skus": own,
        "installed": [asdict(fact) for fact in machine.facts()],
        "skus": [verdict.to_dict() for verdict in verdicts],
        "commands": commands(verdicts),
    }


def _print(machine: Machine, verdicts: list[Verdict], own: list[str], explain: bool) -> None:
    print_result(_installed(machine))
    print_result(f"\nThis machine is: {', '.join(own) or 'no known SKU'}\n")
    print_result(_needs(verdicts) if explain else _overview(verdicts))
    # One by one: of all SKUs together the commands contradict each other, onnxruntime against onnxruntime-gpu.
    for verdict in verdicts if explain else []:
        if todo := commands([verdict]):
            lines = "\n".join(f"  {command}" for command in todo)
            print_result(f"\nFor {verdict.sku}, run:\n{lines}", soft_wrap=True)
    if not explain:
        print_result("\nkiln doctor --sku NAME shows what to do for one.")


def _installed(machine: Machine) -> Group:
    what = machine.description
    table = Table(
        title=f"{what['cpu']}, {what['cores']} cores, {what['memory']}, {what['system']}", title_justify="left"
    )
    for heading in ("what", "found", "where, or what is wrong"):
        table.add_column(heading, overflow="fold")
    for fact in machine.facts():
        table.add_row(fact.name, fact.found or "no", fact.where if fact.ok else fact.problem)
    return Group(table)


def _overview(verdicts: list[Verdict]) -> Table:
    table = Table()
    for heading in ("SKU", "builds", "runs", "missing"):
        table.add_column(heading, overflow="fold")
    for verdict in verdicts:
        missing = ", ".join(need.name for need in verdict.missing)
        table.add_row(verdict.sku, _yes(verdict.can("build")), _yes(verdict.can("run")), missing)
    return table


def _needs(verdicts: list[Verdict]) -> Table:
    table = Table()
    for heading in ("SKU", "needs", "to", "found"):
        table.add_column(heading, overflow="fold")
    for verdict in verdicts:
        for need in verdict.needs:
            table.add_row(verdict.sku, need.name, " and ".join(need.stages), need.problem or "yes")
        for need in [need for need in verdict.optional if not need.met]:
            table.add_row(verdict.sku, need.name, "not all models", _with_command(need))
    return table


def _with_command(need: Need) -> str:
    return need.problem + (f": {need.command}" if need.command else "")


def _yes(value: bool) -> str:
    return "yes" if value else "no"
