"""Plots as inline SVG: no ids that clash on one page, colours that follow the page's theme.

Drawn by matplotlib with placeholder colours, which become CSS variables (`pipeline/data/page.css`); text stays text,
so that it can be searched, read aloud and set in the page's own font.
"""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from plugins.errors import KilnError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT = 2.9
"""Of a usual plot, in inches at 72 points."""
_WIDTH = 4.6  # near a phone's width, so that text stays legible there
_FONT = 10.5

INK, MUTED, GRID, SIDE_A, SIDE_B, LIMIT = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05", "#0a0b06"
_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    SIDE_A: "--side-a",
    SIDE_B: "--side-b",
    LIMIT: "--limit",
}
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kiln",
    "font.size": _FONT,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.unicode_minus": False,
}


@dataclass(frozen=True)
class Plot:
    """One drawing: a heading, what it shows in a sentence (also for screen readers), and `<svg>`."""

    title: str
    description: str
    svg: str


def drawn(title: str, description: str, draw: Callable[["Axes"], None], height: float = HEIGHT) -> Plot:
    """Let `draw` fill the axes of a new plot. Raises KilnError without matplotlib."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KilnError(
            f"cannot import matplotlib ({error}), which draws the plots; install it: pip install 'kiln-engine[models]'"
        ) from error

    buffer = io.StringIO()
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(figure.subplots())
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Plot(title, description, _inline(buffer.getvalue(), title, description))


def _inline(document: str, title: str, description: str) -> str:
    """The `<svg>` element alone, sized by the page, labelled, with ids of its own and the theme's colours."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    prefix = re.sub(r"\W+", "-", title.lower())
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", svg)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    view_box = re.search(r'viewBox="[^"]*"', svg)
    assert view_box is not None
    head = (
        f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {view_box[0]} role="img" '
        f'aria-labelledby="{prefix}-title {prefix}-description">'
        f'<title id="{prefix}-title">{escape(title)}</title>'
        f'<desc id="{prefix}-description">{escape(description)}</desc>'
    )
    return re.sub(r"<svg[^>]*>", lambda _: head, svg, count=1)
