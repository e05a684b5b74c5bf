"""The comparison report as one HTML page that needs nothing else: no script, no font, no network."""

from pathlib import Path

from pipeline.compare.plots import plots_from_report
from pipeline.compare.report import ComparisonReport, number
from pipeline.page import html_from_template, write_page


def html_from_report(report: ComparisonReport) -> str:
    """The page's text. Everything that comes from models or users is escaped."""
    return html_from_template(
        "pipeline.compare",
        "data/report.html.jinja",
        {"number": number},
        report=report,
        sides=(("A", "reference", report.a), ("B", "compared with it", report.b)),
        failed=[check for check in report.checks if not check.passed],
        plots=plots_from_report(report),
    )


def write_html(report: ComparisonReport, path: Path) -> None:
    """Write the page. Raises KilnError where it cannot be written."""
    write_page(html_from_report(report), path)
