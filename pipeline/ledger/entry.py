"""What the ledger holds: one entry for each build, comparison, benchmark, ablation or nightly job. Data only.

`facts` are what an entry's outcome may depend on, flat: model, switches, versions, machine. `figures` are what came
out, one value for each repetition. `document` is the whole report, as its command prints it.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from engines.manifest import PassRecord

Kind = Literal["build", "comparison", "benchmark", "ablation", "nightly"]
TEXTS = ("kind", "created", "name", "subject", "path", "parent", "change")
"""Fields of an entry that are kept and shown as they are."""
OBJECTS = ("facts", "digests", "document")
"""Fields that are JSON objects."""
LIMIT_PREFIX = "limit/"
"""Of figures that are the machine's, not the bundle's."""
_DIGEST = re.compile("[0-9a-f]{64}")
_MOST_CHANGES = 4
"""Changes that a sentence names."""


@dataclass(frozen=True)
class FigureValues:
    """One figure of one run: the values of its repetitions."""

    name: str
    unit: str
    values: tuple[float, ...]
    higher_is_better: bool

    def __post_init__(self) -> None:
        assert self.values


@dataclass(frozen=True)
class Entry:
    """One thing that was done. `subject` is the identity of the bundle it is about, "" where it is about none."""

    kind: Kind
    created: str
    name: str
    subject: str
    path: str
    facts: Mapping[str, str]
    figures: tuple[FigureValues, ...]
    document: Mapping[str, Any]
    passes: tuple[PassRecord, ...] = ()
    parent: int | None = None
    change: str = ""
    number: int = 0
    """Given by the ledger; 0 before."""
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def machine(self) -> str:
        """Identity of the machine and its libraries' owner: entries of different ones are not compared in time."""
        parts = {key: value for key, value in self.facts.items() if key.startswith("machine.")}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]

    def figure(self, name: str) -> FigureValues | None:
        return next((figure for figure in self.figures if figure.name == name), None)


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Facts that differ, as `name: old -> new`."""
    names = [*after, *(name for name in before if name not in after)]
    return [
        f"{name}: {shortened(before.get(name, 'none'))} -> {shortened(after.get(name, 'none'))}"
        for name in names
        if before.get(name, "none") != after.get(name, "none")
    ]


def shortened(text: str) -> str:
    """A SHA-256's first characters; any other text as it is."""
    return text[:12] if _DIGEST.fullmatch(text) else text


def change_sentence(differences: Sequence[str]) -> str:
    """One thing if it is one; else how many, and the first of them."""
    if not differences:
        return "nothing: repeated"
    if len(differences) == 1:
        return differences[0]
    text = f"{len(differences)} things: {'; '.join(differences[:_MOST_CHANGES])}"
    return text + ("; ..." if len(differences) > _MOST_CHANGES else "")


def nearest(entry: Entry, candidates: Sequence[Entry]) -> Entry | None:
    """The parent of an entry: of those of its kind and model, newest first, the one with the fewest changed facts."""
    fitting = [one for one in candidates if one.kind == entry.kind and one.name == entry.name]
    return min(fitting, key=lambda one: len(changes(one.facts, entry.facts)), default=None)
