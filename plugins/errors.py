"""The one error type that a user is meant to read.

Every message says what was found, what was expected and what to do. The command line prints it and
exits with code 2; anything else that escapes is a bug in Kiln.
"""


class KilnError(Exception):
    """Bad input, or a machine that lacks something: the message says what to do about it."""


def first_line(error: BaseException) -> str:
    """What another library's error says first, for our own one-line messages; its type's name where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
