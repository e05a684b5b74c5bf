"""The one error type that a user is meant to read.

Every message says what was found, what was expected and what to do. The command line prints it and
exits with code 2; anything else that escapes is a bug in Kiln.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class KilnError(Exception):
    """Bad input, or a machine that lacks something: the message says what to do about it."""


def first_line(error: BaseException) -> str:
    """What another library's error says first, for our own one-line messages; its type's name where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def first_problem(error: "ValidationError") -> tuple[str, str]:
    """The first field that does not fit, as in `layers.a.scheme`, empty for the whole document; and what is wrong."""
    first = error.errors()[0]
    return ".".join(str(part) for part in first["loc"]), first["msg"]
