"""Results for people on standard output. Progress goes to standard error (`pipeline.progress`)."""

from rich.console import Console, RenderableType

_WIDTH = 200
"""Columns where no terminal says: what is kept or searched has no use for folded cells."""


def print_result(shown: RenderableType, soft_wrap: bool = False) -> None:
    """A table or text, as wide as the terminal, or as it needs to be where there is none.

    Text is printed as it is, brackets and all. `soft_wrap`: lines are left to the terminal, for what is to be copied.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(shown, markup=False, soft_wrap=soft_wrap)
