"""HTML pages that need nothing else: no script, no font, no network; all with one style."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pipeline.drawing import Plot
from plugins.errors import KilnError


@dataclass(frozen=True)
class PageTable:
    """Rows of text; the first column names a row, the others hold numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Page:
    """A report of measurements: a headline, what to know first, figures, plots, tables, and how it was measured."""

    headline: str
    subtitle: str
    remarks: Sequence[str]
    figures: Mapping[str, str]
    plots: Sequence[Plot]
    tables: Sequence[PageTable]
    settings: Mapping[str, str]


def html_from_page(page: Page) -> str:
    """The page's text. Everything that comes from models or users is escaped."""
    return html_from_template("pipeline", "data/measurements.html.jinja", page=page)


def html_from_template(package: str, name: str, filters: Mapping[str, Callable[..., str]] = {}, **values: Any) -> str:
    """A template of a package, with the common style as `style`."""
    import jinja2

    source = files(package).joinpath(name).read_text(encoding="utf-8")
    style = files("pipeline").joinpath("data/page.css").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters.update(filters)
    return environment.from_string(source).render(style=style, **values)


def write_page(text: str, path: Path) -> None:
    """Raises KilnError where the page cannot be written."""
    write_text(text, path, "HTML report")


def write_text(text: str, path: Path, what: str) -> None:
    """Write a file that a user asked for. Raises KilnError, which calls it `what`, where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KilnError(f"the {what} cannot be written to {path}: {error.strerror}; choose another path") from error
