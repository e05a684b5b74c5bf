"""The ledger's file: SQLite, written in short transactions, so that any number of processes may add entries at once.

Every writer takes the write lock before it reads what it builds on (BEGIN IMMEDIATE) and waits for others; readers see
the state before or after an entry. SQLite's rollback journal, not its write-ahead log, which needs shared memory that
network file systems do not have. Knows what an entry is; does not know where entries come from.
"""

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from engines.manifest import PassRecord
from pipeline.ledger.entry import OBJECTS, TEXTS, Entry, FigureValues, Kind, change_sentence, changes, nearest
from plugins.errors import KilnError

VERSION = 1
_WAIT = 60.0
"""Seconds that a writer waits for others."""
_RECENT = 200
"""Entries among which a parent is looked for."""
_TABLES = """
CREATE TABLE entries (
    number INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    created TEXT NOT NULL,
    name TEXT NOT NULL,
    subject TEXT NOT NULL,
    path TEXT NOT NULL,
    machine TEXT NOT NULL,
    parent INTEGER REFERENCES entries (number),
    change TEXT NOT NULL,
    facts TEXT NOT NULL,     -- JSON object of texts, sorted
    digests TEXT NOT NULL,   -- JSON object of texts
    document TEXT NOT NULL   -- JSON, the whole report
) STRICT;
CREATE INDEX entries_by_subject ON entries (subject, kind);
CREATE INDEX entries_by_name ON entries (name, kind);
CREATE TABLE figures (
    entry INTEGER NOT NULL REFERENCES entries (number),
    name TEXT NOT NULL,
    repetition INTEGER NOT NULL,
    unit TEXT NOT NULL,
    higher_is_better INTEGER NOT NULL,
    value REAL NOT NULL,
    PRIMARY KEY (entry, name, repetition)
) STRICT, WITHOUT ROWID;
CREATE INDEX figures_by_name ON figures (name);
CREATE TABLE passes (
    entry INTEGER NOT NULL REFERENCES entries (number),
    position INTEGER NOT NULL,
    name TEXT NOT NULL,
    changed INTEGER NOT NULL,
    rolled_back TEXT,
    record TEXT NOT NULL,    -- JSON, engines.manifest.PassRecord
    PRIMARY KEY (entry, position)
) STRICT, WITHOUT ROWID;
"""


def default_path() -> Path:
    """In the folder for state that outlives restarts: XDG Base Directory Specification 0.8, XDG_STATE_HOME."""
    home = os.environ.get("XDG_STATE_HOME", "")
    base = Path(home) if Path(home).is_absolute() else Path.home() / ".local" / "state"
    return base / "kiln" / "ledger.sqlite"


def _facts_text(facts: Mapping[str, str]) -> str:
    """The same for the same facts, so that they can be looked for."""
    return json.dumps(dict(facts), sort_keys=True)


class Ledger:
    """An opened ledger, made where it does not exist. One thread uses it; others open it again.

    Raises KilnError for a file that is no ledger, one of a newer Kiln, and one that cannot be read or written.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path
        if not create and not path.is_file():
            raise KilnError(f"there is no ledger at {path}; build, compare or bench something first, or give --ledger")
        with self._readable():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=_WAIT, isolation_level=None)
            self._prepare()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def add(self, entry: Entry) -> Entry:
        """Add an entry; gives it with its number.

        Without a parent of its own it gets the nearest earlier entry, and what changed since.
        """
        with self._readable(), self._writing():
            parent = None
            if entry.parent is None:
                parent = nearest(entry, self._select("name = ? AND kind = ?", (entry.name, entry.kind), _RECENT))
            if parent is not None:
                change = change_sentence(changes(parent.facts, entry.facts))
                entry = replace(entry, parent=parent.number, change=change)
            columns = {
                **{name: getattr(entry, name) for name in TEXTS},
                **{name: json.dumps(dict(getattr(entry, name))) for name in OBJECTS},
                "facts": _facts_text(entry.facts),
                "machine": entry.machine,
            }
            cursor = self._connection.execute(
                f"INSERT INTO entries ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})",
                tuple(columns.values()),
            )
            assert cursor.lastrowid is not None
            entry = replace(entry, number=cursor.lastrowid)
            self._add_details(entry)
        return entry

    def entries(
        self,
        *,
        kind: Kind | None = None,
        name: str | None = None,
        subject: str | None = None,
        facts: Mapping[str, str] | None = None,
        limit: int = -1,
    ) -> list[Entry]:
        """Those that fit, newest first."""
        given = {
            "kind": kind,
            "name": name,
            "subject": subject,
            "facts": None if facts is None else _facts_text(facts),
        }
        wanted = {column: value for column, value in given.items() if value is not None}
        where = " AND ".join(f"{column} = ?" for column in wanted) or "1"
        with self._readable():
            return self._select(where, tuple(wanted.values()), limit)

    def entry(self, number: int) -> Entry:
        """Raises KilnError when there is none of this number."""
        with self._readable():
            found = self._select("number = ?", (number,), 1)
        if not found:
            raise KilnError(f"the ledger {self.path} has no entry {number}; kiln ledger list shows what it has")
        return found[0]

    def _select(self, where: str, values: Sequence[object], limit: int) -> list[Entry]:
        names = ("number", *TEXTS, *OBJECTS)
        rows = self._connection.execute(
            f"SELECT {', '.join(names)} FROM entries WHERE {where} ORDER BY number DESC LIMIT ?", (*values, limit)
        ).fetchall()
        return [self._entry(dict(zip(names, row, strict=True))) for row in rows]

    def _entry(self, row: dict[str, Any]) -> Entry:
        """From an entry's own row, with what the other tables have of it."""
        number = row["number"]
        objects = {name: json.loads(row[name]) for name in OBJECTS}
        return Entry(**{**row, **objects}, figures=self._figures(number), passes=self._passes(number))

    def _figures(self, number: int) -> tuple[FigureValues, ...]:
        rows = self._connection.execute(
            "SELECT name, unit, higher_is_better, value FROM figures WHERE entry = ? ORDER BY name, repetition",
            (number,),
        )
        found: dict[str, tuple[str, bool, list[float]]] = {}
        for name, unit, higher, value in rows:
            found.setdefault(name, (unit, bool(higher), []))[2].append(value)
        return tuple(FigureValues(name, unit, tuple(values), higher) for name, (unit, higher, values) in found.items())

    def _passes(self, number: int) -> tuple[PassRecord, ...]:
        rows = self._connection.execute("SELECT record FROM passes WHERE entry = ? ORDER BY position", (number,))
        return tuple(PassRecord.model_validate_json(record) for (record,) in rows)

    def _add_details(self, entry: Entry) -> None:
        self._connection.executemany(
            "INSERT INTO figures VALUES (?, ?, ?, ?, ?, ?)",
            [
                (entry.number, figure.name, place, figure.unit, int(figure.higher_is_better), value)
                for figure in entry.figures
                for place, value in enumerate(figure.values)
            ],
        )
        self._connection.executemany(
            "INSERT INTO passes VALUES (?, ?, ?, ?, ?, ?)",
            [
                (entry.number, place, record.name, int(record.changed), record.rolled_back, record.model_dump_json())
                for place, record in enumerate(entry.passes)
            ],
        )

    def _prepare(self) -> None:
        """Make the tables in a new file; refuse a file of another kind."""
        with self._writing():
            (version,) = self._connection.execute("PRAGMA user_version").fetchone()
            tables = {name for (name,) in self._connection.execute("SELECT name FROM sqlite_master")}
            if version == 0 and not tables:
                for statement in _TABLES.split(";")[:-1]:
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA user_version = {VERSION}")
            elif version != VERSION:
                raise KilnError(
                    f"{self.path} is an SQLite file of version {version}; this Kiln's ledger has version {VERSION}: "
                    "use the Kiln that made it, or another --ledger"
                )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """SQLite's and the system's errors, with the file's name and what to do."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise KilnError(
                f"the ledger {self.path} cannot be used: {error}; check the file and its folder, or give --ledger"
            ) from error
