"""The commands' side: add an entry, and never let the ledger lose what they found."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pipeline.ledger.entry import Entry
from pipeline.ledger.store import Ledger, default_path
from pipeline.ledger.views import flags
from pipeline.progress import Progress


def ledger_options(command: Any) -> Any:
    """`--ledger FILE` and `--no-ledger`; gives the command the argument `ledger`: a path, or None for none."""
    command = click.option(
        "--ledger",
        type=click.Path(path_type=Path),
        default=default_path,
        show_default="$XDG_STATE_HOME/kiln/ledger.sqlite",
        help="Where what is found is recorded (kiln ledger).",
    )(command)
    return click.option("--no-ledger", is_flag=True, help="Record nothing.")(command)


def record(path: Path, make: Callable[[], Entry], progress: Progress) -> Entry | None:
    """Add what `make` gives, and say what got worse; a ledger that fails costs a warning and nothing else."""
    try:
        with Ledger(path) as ledger:
            entry = ledger.add(make())
            worse = flags(ledger, entry)
    except Exception as error:  # also a bug of ours: the result is worth more than its record
        progress.note(f"warning: not recorded: {error}")
        return None
    since = f"; since entry {entry.parent}: {entry.change}" if entry.parent is not None else ""
    progress.note(f"recorded as entry {entry.number} of {path}{since}")
    if worse:
        progress.note(f"worse than before the last change: {', '.join(worse)}; see kiln ledger diff")
    return entry
