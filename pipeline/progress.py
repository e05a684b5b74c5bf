"""Stage-by-stage progress on standard error, with times; standard output stays free for results."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


class Progress:
    """Prints one line per stage. `seconds` keeps how long each took, in order."""

    def __init__(self, console: Console | None = None, verbose: bool = False) -> None:
        self.console = console or Console(file=sys.stderr, highlight=False)
        self.verbose = verbose
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[Callable[[str], None]]:
        """Time a stage; a spinner shows on a terminal while it runs, with the text that is given to what this gives."""
        start = time.perf_counter()
        with self.console.status(f"{name} ...") as status:
            yield lambda text: status.update(f"{name} ... {text}")
        self.seconds[name] = time.perf_counter() - start
        self.console.print(f"  {name:<28} {self.seconds[name]:7.1f} s")

    def note(self, text: str) -> None:
        """A line that users should see."""
        self.console.print(f"  {text}", markup=False, soft_wrap=True)

    def detail(self, text: str) -> None:
        """A line for --verbose."""
        if self.verbose:
            self.console.print(f"    {text}", style="dim", markup=False, soft_wrap=True)
