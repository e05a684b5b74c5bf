"""Forecasts of one model for many SKUs, as a table in the terminal and as a page with plots."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from pipeline.drawing import GRID, HEIGHT, INK, SIDE_A, SIDE_B, Plot, drawn
from pipeline.forecast import RESERVE, Forecast, size
from pipeline.page import Page, PageTable, html_from_page
from pipeline.roofline import Point, rate_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PLAIN = ("one sample", "largest batch", "its rate")
_ROW = 0.2
"""Inches of a plot's height for each SKU."""


def table_from_forecasts(model: str, forecasts: list[Forecast]) -> Table:
    table = Table(
        title=f"{model}: {size(forecasts[0].weights)} of weights; rates are upper bounds", title_justify="left"
    )
    lengths = list(forecasts[0].sequences)
    shown = list(dict.fromkeys([*lengths[:1], *lengths[-1:]]))
    table.add_column("SKU")
    table.add_column("fits", overflow="fold")
    for length in shown:
        for heading in (f"prefill {length}", f"decode 1 at {length}", f"largest batch at {length}", "decode it"):
            table.add_column(heading, justify="right")
    if not shown:
        for heading in _PLAIN:
            table.add_column(heading, justify="right")
    for forecast in forecasts:
        cells = (
            [cell for length in shown for cell in _decoder_cells(forecast, length)] if shown else _plain_cells(forecast)
        )
        fits = "yes, plugin-free" if forecast.plugin_free else "yes"
        table.add_row(forecast.sku, forecast.problem or fits, *cells)
    return table


def _decoder_cells(forecast: Forecast, length: int) -> list[str]:
    """Prefill, decoding of one sequence, the largest batch and its decoding, in tokens/s."""
    roofline = forecast.roofline
    points = [point for point in roofline.points if point.length == length] if roofline else []
    prefill = next((point for point in points if point.way == "prefill"), None)
    decodes = [point for point in points if point.way == "decode"]
    batch = forecast.sequences[length]
    one = next((point for point in decodes if point.batch == 1), None)
    most = next((point for point in decodes if point.batch == batch), None)
    texts = [f"{rate_text(point.rate)} {point.bound_by[0]}" if point else "" for point in (prefill, one, most)]
    return [texts[0], texts[1], f"{batch:,}", texts[2]]


def _plain_cells(forecast: Forecast) -> list[str]:
    calls = forecast.roofline.points if forecast.roofline else ()
    texts = [f"{rate_text(point.rate)}/s {point.bound_by[0]}" for point in (*calls[:1], *calls[-1:])] or ["", ""]
    most = "unknown" if forecast.most_samples is None else f"{forecast.most_samples:,}"
    return [texts[0], most, texts[1]]


def html_from_forecasts(model: str, forecasts: Sequence[Forecast]) -> str:
    """The page's text. Raises KilnError without matplotlib."""
    fitting = [forecast for forecast in forecasts if forecast.problem is None and forecast.roofline is not None]
    first = forecasts[0]
    figures = {"weights": size(first.weights)}
    if first.kv_bytes_per_token is not None:
        figures["KV cache"] = f"{size(first.kv_bytes_per_token)} a token"
    for precision in dict.fromkeys(forecast.roofline.precision for forecast in fitting if forecast.roofline):
        figures["precision"] = precision
    return html_from_page(
        Page(
            headline=f"{model} on {len(forecasts)} machine types",
            subtitle="Upper bounds from advertised peaks; no engine reaches them",
            remarks=[forecast.problem for forecast in forecasts if forecast.problem is not None],
            figures=figures,
            plots=[plot for plot in (_rates(fitting), _batches(fitting)) if plot is not None],
            tables=_page_tables(forecasts),
            settings={
                "rates": "work divided by the SKU's peak rate (p: products), or the bytes read by its bandwidth "
                "(r: reading), whichever takes longer; not measured",
                "largest batch": f"what fits beside the weights in {1 - RESERVE:.0%} of the memory",
            },
        )
    )


def _page_tables(forecasts: Sequence[Forecast]) -> list[PageTable]:
    """One for each length, narrow enough for a phone."""
    lengths = list(forecasts[0].sequences)
    if not lengths:
        rows = [[forecast.sku, *_plain_cells(forecast)] for forecast in forecasts]
        return [PageTable("All SKUs", ["SKU", *_PLAIN], rows)]
    return [
        PageTable(
            f"At {length} tokens, in tokens/s",
            ["SKU", "prefill", "decode, batch 1", "largest batch", "decode, that batch"],
            [[forecast.sku, *_decoder_cells(forecast, length)] for forecast in forecasts],
        )
        for length in lengths
    ]


def _rates(forecasts: Sequence[Forecast]) -> Plot | None:
    """One call or sequence, and the largest batch, of each SKU, coloured by what limits it."""
    pairs = [(forecast.sku, _ends(forecast)) for forecast in forecasts]
    pairs = [(name, ends) for name, ends in pairs if ends]
    if not pairs:
        return None
    point = pairs[0][1][-1]
    what = f"decoding at {point.length} tokens" if point.way == "decode" else "samples"

    def draw(axes: "Axes") -> None:
        for row, (_, ends) in enumerate(pairs):
            axes.plot([end.rate for end in ends], [row] * len(ends), color=GRID, linewidth=2, zorder=1)
        for limit, color in (("reading", SIDE_A), ("products", SIDE_B)):
            dots = [(end.rate, row) for row, (_, ends) in enumerate(pairs) for end in ends if end.bound_by == limit]
            rates, rows = [rate for rate, _ in dots], [row for _, row in dots]
            axes.scatter(rates, rows, color=color, s=18, label=limit, zorder=2)
        axes.set_xscale("log")
        _sku_axis(axes, [name for name, _ in pairs])
        axes.set(xlabel=point.unit)
        axes.legend(frameon=False, labelcolor=INK, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)

    sentence = "Left dot: a batch of one. Right dot: the largest batch that fits. Colours: what limits it."
    return drawn(f"Highest rate of {what}", sentence, draw, _height(len(pairs)))


def _ends(forecast: Forecast) -> list[Point]:
    """The smallest and the largest batch, of a decoder at its shortest context."""
    points = forecast.roofline.points if forecast.roofline else ()
    chosen = [point for point in points if point.way != "prefill"]
    return [point for point in chosen if point.length == chosen[0].length]


def _batches(forecasts: Sequence[Forecast]) -> Plot | None:
    lengths = list(forecasts[0].sequences) if forecasts else []
    largest = [
        (forecast.sku, forecast.sequences[lengths[0]] if lengths else forecast.most_samples) for forecast in forecasts
    ]
    known = [(name, count) for name, count in largest if count]
    if not known:
        return None
    what = f"sequences of {lengths[0]} tokens" if lengths else "samples"

    def draw(axes: "Axes") -> None:
        axes.barh(range(len(known)), [count for _, count in known], color=SIDE_A, height=0.6)
        _sku_axis(axes, [name for name, _ in known])
        axes.set(xlabel=what)

    return drawn(
        "Largest batch", f"{what[0].upper()}{what[1:]} that fit beside the weights.", draw, _height(len(known))
    )


def _sku_axis(axes: "Axes", names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()


def _height(rows: int) -> float:
    return max(HEIGHT, 0.9 + _ROW * rows)
