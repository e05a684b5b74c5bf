"""A run's report as one HTML page, with how much slower or faster each candidate is than `stable`."""

from typing import TYPE_CHECKING

from pipeline.drawing import HEIGHT, LIMIT, SIDE_A, Plot, drawn
from pipeline.nightly.report import JobReport, NightlyReport
from pipeline.page import Page, PageTable, html_from_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def html_from_nightly(report: NightlyReport) -> str:
    """The page's text. Raises KilnError without matplotlib, where something was measured."""
    held = [job for job in report.jobs if job.status in ("held back", "failed")]
    counts = {status: sum(job.status == status for job in report.jobs) for status in dict.fromkeys(_statuses(report))}
    summary = ", ".join(f"{count} {status}" for status, count in counts.items()) or "no jobs"
    speed = [(job, figures) for job in report.jobs if (figures := _figures(job, "speed"))]
    return html_from_page(
        Page(
            headline=f"Nightly: {summary}",
            subtitle=f"run {report.run}, {report.created}" + (", continued after a crash" if report.resumed else ""),
            remarks=[f"{job.model} on {job.sku} {job.status}: {job.text}" for job in held],
            figures={f"{job.model} on {job.sku}": _sentence(job) for job in report.jobs},
            plots=[_speed_plot(speed)] if speed else [],
            tables=[_table(job) for job in report.jobs],
            settings={"registry": report.registry, **report.machine, **report.versions},
        )
    )


def _statuses(report: NightlyReport) -> list[str]:
    return [job.status for job in report.jobs]


def _sentence(job: JobReport) -> str:
    version = "" if job.version is None else f", version {job.version}"
    stable = "" if job.stable is None else f", stable is {job.stable}"
    return f"{job.status}{version}{stable}: {job.text}"


def _table(job: JobReport) -> PageTable:
    rows = [
        [
            case.name,
            case.status,
            case.text,
            f"{case.seconds:.1f} s",
            "" if case.peak is None else f"{case.peak / 2**20:,.0f} MiB",
        ]
        for case in job.cases
    ]
    rows += [[f"changed: {name}", "", change, "", ""] for name, change in job.changes.items()]
    rows += [[f"page: {name}", "", path, "", ""] for name, path in job.attachments.items()]
    return PageTable(f"{job.model} on {job.sku}", ("step", "result", "what was found", "time", "memory"), rows)


def _figures(job: JobReport, gate: str) -> dict[str, float]:
    for case in job.cases:
        if case.name == gate:
            return {name: float(value) for name, value in case.figures.items()}
    return {}


def _speed_plot(found: list[tuple[JobReport, dict[str, float]]]) -> Plot:
    def draw(axes: "Axes") -> None:
        for row, (_, figures) in enumerate(found):
            axes.plot([figures["lowest"], figures["highest"]], [row, row], color=SIDE_A, linewidth=2)
            axes.plot([figures["ratio"]], [row], "o", color=SIDE_A)
            axes.plot([figures["limit"]] * 2, [row - 0.35, row + 0.35], color=LIMIT, linewidth=2)
        axes.set_yticks(range(len(found)), [f"{job.model}\n{job.sku}" for job, _ in found])
        axes.invert_yaxis()
        axes.set_xlabel("time of the candidate, stable is 1")

    text = "Median ratio of times with its confidence interval; the upright mark is the limit."
    return drawn("Candidates against stable", text, draw, height=max(HEIGHT, 0.6 + 0.45 * len(found)))
