"""A profile as one HTML page: the roofline with the operators on it, and where each phase's time goes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.drawing import GRID, HEIGHT, INK, LIMIT, MUTED, SIDE_A, SIDE_B, Plot, drawn
from pipeline.page import Page, PageTable, html_from_page
from pipeline.profile.analysis import BOUNDS, OperatorRow, Phase, rows_from_phase
from pipeline.profile.profiling import Profile
from pipeline.profile.report import (
    COLUMNS,
    phase_sentence,
    remarks,
    roofline_sentence,
    row_texts,
    verdict_sentence,
    waste_sentence,
)
from pipeline.profile.roofline import Roofline
from pipeline.profile.wastes import SHOWN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LABELLED = 0.04
"""Share of a phase's time from which an operator has its name beside its point."""
_DRAWN = 0.0005
"""Share from which it is drawn at all."""
_COLOURS = {"compute": SIDE_B, "bandwidth": SIDE_A, "launch": MUTED, "device": SIDE_B, "host": LIMIT}


def html_from_profile(profile: Profile) -> str:
    """The page's text."""
    manifest, phases, roof = profile.bundle.manifest, profile.phases, profile.roofline
    figures = {phase.title: f"{phase_sentence(phase)}. {verdict_sentence(phase, roof)}." for phase in phases}
    for phase in phases:
        for place, waste in enumerate(profile.wastes[phase.name][:SHOWN], 1):
            figures[f"{phase.title}, waste {place}"] = waste_sentence(waste, phase)
    tables = [PageTable(phase.title, COLUMNS, row_texts(phase)) for phase in phases]
    return html_from_page(
        Page(
            headline=f"{manifest.name}: where the time goes",
            subtitle=f"{profile.bundle.path}, profiled {profile.created} by kiln profile",
            remarks=remarks(profile),
            figures=figures,
            plots=[_parts_plot(phases), *([] if roof is None else (_roofline_plot(phase, roof) for phase in phases))],
            tables=tables,
            settings={
                **({} if roof is None else {"roofline": roofline_sentence(roof)}),
                "bundle": profile.bundle.sha256,
                "ran on": profile.processor,
                **({} if profile.threads is None else {"threads": str(profile.threads)}),
                **profile.machine,
                **{f"{name} version": text for name, text in profile.versions.items()},
            },
        )
    )


def _parts_plot(phases: Sequence[Phase]) -> Plot:
    def draw(axes: "Axes") -> None:
        for row, phase in enumerate(phases):
            whole, left = sum(phase.parts.values()), 0.0
            for bound in BOUNDS:
                share = phase.parts[bound] / whole
                label = bound if row == 0 else None
                axes.barh(row, share, left=left, height=0.55, color=_COLOURS[bound], label=label)
                left += share
        axes.set_yticks(range(len(phases)), [phase.title.partition(", context")[0] for phase in phases])
        axes.invert_yaxis()
        axes.set(xlabel="share of the time", xlim=(0, 1))
        axes.legend(ncols=2, loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False, labelcolor=INK)

    return drawn("What bounds each phase", "Operators by what they cannot be faster than, and the time in none.", draw)


def _roofline_plot(phase: Phase, roofline: Roofline) -> Plot:
    rows = [row for row in rows_from_phase(phase) if row.bytes and row.seconds > _DRAWN * phase.seconds]

    def draw(axes: "Axes") -> None:
        _draw_roofs(axes, roofline, phase, rows)
        for row in rows:
            share = row.seconds / phase.seconds
            rate = row.operations / row.seconds
            axes.scatter(
                row.intensity, rate, s=12 + 300 * share, color=_COLOURS[row.bound], alpha=0.85, linewidths=0, zorder=3
            )
            if share >= _LABELLED:
                axes.annotate(
                    row.operator,
                    (row.intensity, rate),
                    xytext=(5, 4),
                    textcoords="offset points",
                    color=INK,
                    fontsize=9,
                )

    text = "Each point is an operator, as large as its time; the line above it is what this machine was measured to do."
    return drawn(f"Roofline: {phase.title}", text, draw, height=HEIGHT * 1.35)


def _draw_roofs(axes: "Axes", roofline: Roofline, phase: Phase, rows: Sequence[OperatorRow]) -> None:
    least = min([0.05, *(row.intensity / 2 for row in rows)])
    most = max([roofline.ridge * 8, *(row.intensity * 4 for row in rows)])
    for rate, colour, name in ((roofline.memory, SIDE_A, "memory"), (roofline.cache, MUTED, "caches")):
        ridge = roofline.peak / rate
        axes.plot([least, ridge], [least * rate, roofline.peak], color=colour, linewidth=1.2)
        axes.annotate(
            f"{name}, {rate / 1e9:.0f} GB/s", (least, least * rate), xytext=(2, 3), textcoords="offset points",
            color=MUTED, fontsize=8, rotation=0,
        )  # fmt: skip
    axes.plot([roofline.peak / roofline.cache, most], [roofline.peak] * 2, color=SIDE_B, linewidth=1.2)
    axes.annotate(
        f"peak in {roofline.peak_of}, {roofline.peak / 1e9:.0f} Gop/s", (most, roofline.peak), xytext=(0, 3),
        textcoords="offset points", color=MUTED, fontsize=8, ha="right",
    )  # fmt: skip
    products = max((node.work.rows for node in phase.operators), default=0)
    if products:
        ceiling = roofline.product_rate(roofline.peak_of, products)
        axes.plot([ceiling / roofline.cache, most], [ceiling] * 2, color=GRID, linestyle="--", linewidth=1.2)
        axes.annotate(
            f"products of {products} rows", (most, ceiling), xytext=(0, -9), ha="right", textcoords="offset points",
            color=MUTED, fontsize=8,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(xlabel="operations a byte", ylabel="operations/s", xlim=(least, most))
