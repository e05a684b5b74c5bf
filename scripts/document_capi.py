"""The C API's reference in Markdown, from kiln.h and its comments. `python scripts/document_capi.py > FILE`.

kiln.h is written to be read, so its comments are taken as they stand: one before a type or before functions that belong
together, one behind a field or a constant. What is printed is checked against what the C parser of cffi finds, by test.
Tools for this (mkdocstrings-c, Doxygen) know no function tables, which is what kiln.h hands out.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HEADER = Path(__file__).parents[1] / "engines" / "capi" / "kiln.h"
_TYPE = re.compile(r"typedef (enum|struct) (\w+) \{\n(.*?)\n\} \w+;", re.DOTALL)
_COMMENT = re.compile(r"/\*(.*?)\*/", re.DOTALL)
_FUNCTION = re.compile(r"\(\*(\w+)\)")
_TABLE = "kiln_api"


@dataclass
class Member:
    """A constant or a field; a function of the table has its declaration as `code`."""

    name: str
    code: str
    text: str


@dataclass
class Type:
    """An enumeration or a structure with what is said of it."""

    kind: str
    name: str
    text: str
    members: list[Member] = field(default_factory=list)


def types_from_header(text: str) -> list[Type]:
    """Every enumeration and structure that has members, in order."""
    found = []
    for match in _TYPE.finditer(text):
        before = text[: match.start()].rstrip()
        comment = _said(before[before.rindex("/*") :]) if before.endswith("*/") else ""
        found.append(Type(match[1], match[2], comment, list(_members(match[3], match[1]))))
    return found


def _members(body: str, kind: str) -> Iterator[Member]:
    """A comment that begins behind a member is its own; one on a line of its own belongs to the functions after it."""
    shared, last, end = "", None, "," if kind == "enum" else ";"
    for piece in re.split(r"(/\*.*?\*/)", body, flags=re.DOTALL):
        if piece.startswith("/*"):
            if last is not None:
                last.text = _said(piece)
            else:
                shared = _said(piece)
        for code in [] if piece.startswith("/*") else piece.split(end):
            code = " ".join(code.split())
            if code:
                function = _FUNCTION.search(code)
                name = function[1] if function else re.split(r"[\s*]", code.partition(" =")[0])[-1]
                last = Member(name, code, shared if function else "")
                yield last
        if not piece.startswith("/*") and "\n" in piece[len(piece.rstrip()) :]:
            last = None  # what follows is on a line of its own


def _said(comment: str) -> str:
    """A comment's words as one paragraph."""
    return " ".join(line.strip().lstrip("*").strip() for line in comment[2:-2].splitlines()).strip()


def markdown_from_header(text: str) -> str:
    """The whole page."""
    types = types_from_header(text)
    table = next(one for one in types if one.name == _TABLE)
    opening = _COMMENT.search(text)
    assert opening is not None, "kiln.h begins with its rules"
    lines = [line.removeprefix(" *").removeprefix(" ").rstrip() for line in opening[1].splitlines()]
    parts = [
        "# C API reference\n\nMade by `scripts/document_capi.py` from `engines/capi/kiln.h`. How to build and use the "
        "library: [C API](../c-api.md).",
        "```text\n" + "\n".join(lines).strip() + "\n```",
        "## Functions\n\n`const kiln_api *kiln_get_api(uint32_t version)` gives the table, or NULL where the library "
        "does not know the version.",
        *(_function(member) for member in table.members if _FUNCTION.search(member.code)),
        "## Types",
        *(_type(one) for one in types if one.name != _TABLE),
    ]
    return "\n\n".join(parts) + "\n"


def _function(member: Member) -> str:
    declaration = re.sub(r"\(\*(\w+)\)", r"\1", member.code)
    return f"### {member.name}\n\n```c\n{declaration};\n```\n\n{member.text}"


def _type(one: Type) -> str:
    heading = "value" if one.kind == "enum" else "field"
    rows = [f"| `{member.code}` | {member.text.replace('|', chr(92) + '|')} |" for member in one.members]
    return "\n\n".join(
        part for part in (f"### {one.name}", one.text, "\n".join([f"| {heading} | |", "|---|---|", *rows])) if part
    )


if __name__ == "__main__":
    print(markdown_from_header(HEADER.read_text(encoding="utf-8")), end="")
