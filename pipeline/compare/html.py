"""The comparison report as one HTML page that needs nothing else: no script, no font, no network."""

from importlib.resources import files
from pathlib import Path

from pipeline.compare.plots import plots_from_report
from pipeline.compare.report import ComparisonReport, number
from plugins.errors import KilnError


def html_from_report(report: ComparisonReport) -> str:
    """The page's text. Everything that comes from models or users is escaped."""
    import jinja2

    source = files("pipeline.compare").joinpath("data/report.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["number"] = number
    return environment.from_string(source).render(
        report=report,
        sides=(("A", "reference", report.a), ("B", "compared with it", report.b)),
        failed=[check for check in report.checks if not check.passed],
        plots=plots_from_report(report),
    )


def write_html(report: ComparisonReport, path: Path) -> None:
    """Write the page. Raises KilnError where it cannot be written."""
    page = html_from_report(report)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise KilnError(
            f"the HTML report cannot be written to {path}: {error.strerror}; choose another path"
        ) from error
