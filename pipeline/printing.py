"""Results for people on standard output. Progress goes to standard error (`pipeline.progress`)."""

from rich.console import Console, RenderableType

_WIDTH = 200
"""Columns where no terminal says: what is kept or searched has no use for folded cells."""


def print_result(shown: RenderableType) -> None:
    """A table or text, as wide as the terminal, or as it needs to be where there is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(shown)
