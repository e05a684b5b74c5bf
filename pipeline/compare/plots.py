"""The plots of a comparison."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.compare.report import ComparisonReport, Curves, number
from pipeline.drawing import GRID, INK, LIMIT, MUTED, SIDE_A, SIDE_B, Plot, drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW = 0.34  # inches, as all heights


def plots_from_report(report: ComparisonReport) -> tuple[Plot, ...]:
    """All plots that the report has data for."""
    plots = []
    if report.curves is not None:
        plots += _text_plots(report, report.curves)
    if report.prompts:
        plots.append(_greedy_plot(report))
    if report.outputs and report.model_kind == "plain":
        plots.append(_output_plot(report))
    return tuple(plots)


def _text_plots(report: ComparisonReport, curves: Curves) -> list[Plot]:
    limits = {check.name: check.limit for check in report.checks}

    def error(axes: "Axes") -> None:
        _log_line(axes, curves.positions, curves.error_max, limits["logit_error_max"])
        axes.set(xlabel="token of the text", ylabel="max |a - b|")

    def kl(axes: "Axes") -> None:
        _log_line(axes, curves.positions, curves.kl_mean, limits["kl_mean"])
        axes.set(xlabel="token of the text", ylabel="KL(A || B), nats")

    def histogram(axes: "Axes") -> None:
        widths = [right - left for left, right in zip(curves.kl_edges, curves.kl_edges[1:], strict=False)]
        axes.bar(curves.kl_edges[:-1], curves.kl_counts, widths, align="edge", color=SIDE_A)
        axes.set(xlabel="log10 of KL(A || B), nats", ylabel="tokens")

    def perplexity(axes: "Axes") -> None:
        places = range(len(curves.window_starts))
        axes.bar([i - 0.2 for i in places], _finite(curves.window_perplexity_a), 0.38, color=SIDE_A, label="A")
        axes.bar([i + 0.2 for i in places], _finite(curves.window_perplexity_b), 0.38, color=SIDE_B, label="B")
        shown = list(places)[:: max(1, len(curves.window_starts) // 6)]
        axes.set_xticks(shown, [str(curves.window_starts[i]) for i in shown])
        axes.set(xlabel="first token of the window", ylabel="perplexity")
        axes.grid(axis="x", visible=False)
        axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 0.98), labelcolor=INK)

    worst = max(curves.error_max, key=lambda value: math.inf if math.isnan(value) else value)
    a, b = report.figures["perplexity_a"], report.figures["perplexity_b"]
    return [
        drawn("Logit error along the text", f"The largest is {number(worst)}; the dashed line is the limit.", error),
        drawn(
            "KL divergence along the text",
            f"Its mean is {number(report.figures['kl_mean'])} nats; the dashed line is the limit of the mean.",
            kl,
        ),
        drawn("KL divergence, distribution", "How many tokens have which divergence.", histogram),
        drawn("Perplexity by window", f"Over the whole text A has {a:.4f}, B {b:.4f}.", perplexity),
    ]


def _greedy_plot(report: ComparisonReport) -> Plot:
    from matplotlib.ticker import MaxNLocator

    rows = report.prompts

    def draw(axes: "Axes") -> None:
        places = range(len(rows))
        axes.barh(places, [row.tokens for row in rows], 0.62, color=GRID)
        axes.barh(places, [row.agreed for row in rows], 0.62, color=SIDE_A)
        axes.set_yticks(places, [f"{row.prompt_tokens} tokens" for row in rows])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="tokens that agree before the first difference", xlim=(0, max(row.tokens for row in rows)))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)

    whole = sum(row.agreed == row.tokens for row in rows)
    sentence = f"On {whole} of {len(rows)} prompts all {rows[0].tokens} tokens agree."
    return drawn("Greedy agreement by prompt", sentence, draw, 1.1 + _ROW * len(rows))


def _output_plot(report: ComparisonReport) -> Plot:
    rows = report.outputs
    limit = report.checks[0].limit

    def draw(axes: "Axes") -> None:
        lowest, highest = _decades([value for row in rows for value in (row.max_abs, row.mean_abs)] + [limit])
        places = range(len(rows))
        for offset, color, label, values in (
            (-0.19, SIDE_A, "max", [row.max_abs for row in rows]),
            (0.19, MUTED, "mean", [row.mean_abs for row in rows]),
        ):
            axes.barh(
                [i + offset for i in places],
                [_at_least(value, lowest) for value in values],
                0.36,
                color=color,
                label=label,
            )
        axes.axvline(limit, color=LIMIT, linestyle="--", linewidth=1.2)
        axes.set_xscale("log")
        axes.set_xlim(lowest, highest)
        axes.xaxis.set_minor_formatter(lambda value, place: "")
        axes.set_yticks(places, [_shortened(row.name) for row in rows])
        axes.set(xlabel="|a - b|")
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 0.98), labelcolor=INK)

    sentence = f"Over {sum(row.elements for row in rows):,} elements; the dashed line is the absolute limit."
    return drawn("Error by output", sentence, draw, 1.3 + 2 * _ROW * len(rows))


def _log_line(axes: "Axes", x: Sequence[int], values: Sequence[float], limit: float) -> None:
    """A curve on a logarithmic scale that always shows the limit; zeros lie on the bottom edge."""
    lowest, _ = _decades([*values, limit])
    axes.plot(x, [_at_least(value, lowest) for value in values], color=SIDE_A, linewidth=1.4)
    if limit > 0:
        axes.axhline(limit, color=LIMIT, linestyle="--", linewidth=1.2)
    axes.set_yscale("log")
    axes.set_ylim(*_decades([*values, limit]))
    axes.yaxis.set_minor_formatter(lambda value, place: "")


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Powers of ten around all positive values, with some room, so that an axis has two labels or more."""
    positive = [value for value in values if value > 0 and math.isfinite(value)] or [1e-9]
    low, high = math.floor(math.log10(min(positive) / 1.3)), math.ceil(math.log10(max(positive) * 1.3))
    return 10.0**low, 10.0**high


def _at_least(value: float, lowest: float) -> float:
    """What a logarithmic axis can show; not a number leaves a gap."""
    return max(value, lowest) if math.isfinite(value) else math.nan


def _finite(values: Sequence[float]) -> list[float]:
    return [value if math.isfinite(value) else math.nan for value in values]


def _shortened(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:8]}…{name[-9:]}"
