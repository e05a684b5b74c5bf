"""Text for calibration and judging where the user gives none: the documentation that comes with every Python.

It is English prose of some 450 kB, so it has texts of every length; but it is nobody's traffic, and users are told.
"""

from functools import cache

ORIGIN = "Python's own documentation (give --calibration and --gate-text: it is not your traffic)"


@cache
def default_text() -> str:
    """The longest topics first, so that the text begins with continuous prose."""
    from pydoc_data.topics import topics

    return "\n\n".join(sorted(topics.values(), key=len, reverse=True))
