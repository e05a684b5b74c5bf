"""The options of `build-engine` that quantise."""

from pathlib import Path
from typing import Any, Literal, get_args

import click

from passes.quantization.plan import KvScheme, Rounding
from pipeline.cli_calibrate import calibration_options, config_from_options
from pipeline.quantize.config import ATTENTIONS, QUANTS, SEARCHES, QuantizeConfig

_DEFAULTS = QuantizeConfig()
_FILE = click.Path(path_type=Path)


class _SmoothType(click.ParamType):
    """An alpha, `search` or `none`."""

    name = "ALPHA|search|none"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | Literal["search", "none"]:
        if value in ("search", "none"):
            return value
        try:
            alpha = float(value)
        except ValueError:
            self.fail(f"expected a number, search or none; found {value!r}", param, ctx)
        if not 0 <= alpha <= 1:
            self.fail(f"expected 0 to 1; found {value}", param, ctx)
        return alpha


def quantize_options(command: Any) -> Any:
    """What `quantize_from_options` reads."""
    options = [
        click.option("--quant", type=click.Choice(QUANTS), help="Quantise; int8 and int4 choose a scheme for the SKU."),
        click.option("--plan", type=_FILE, help="Precision plan (TOML) to use instead of making one."),
        click.option("--table", type=_FILE, help="Calibration table to use instead of calibrating."),
        click.option("--keep", multiple=True, metavar="LAYER", help="Leave a layer float; * and ? match many."),
        click.option("--keep-ends/--quantise-ends", default=True, help="Whether the first and last layer stay."),
        click.option(
            "--search",
            type=click.Choice(SEARCHES),
            default=_DEFAULTS.search,
            show_default=True,
            help="All layers; those that get faster; those of them whose measured sensitivity allows it; or all but "
            "the noisiest, as few as accuracy allows, whatever they save.",
        ),
        click.option("--findings", type=_FILE, help="File that keeps measured sensitivities, to go on after a break."),
        click.option("--group-size", type=int, help="Products that share a scale.  [default: by scheme]"),
        click.option(
            "--rounding", type=click.Choice(get_args(Rounding)), default=_DEFAULTS.rounding, show_default=True
        ),
        click.option(
            "--smooth",
            type=_SmoothType(),
            help="SmoothQuant's alpha, 0 to 1, for all layers; or 'search' each layer's own; or 'none'.  "
            "[default: search for w8a8 and, on a GPU, int8; else none]",
        ),
        click.option(
            "--kv-cache",
            "kv",
            type=click.Choice([kind for kind in get_args(KvScheme) if kind]),
            help="Keep keys, or keys and values, as INT8 in the cache.",
        ),
        click.option("--kv-limit", type=int, help="Most tokens of a sequence with such a cache.  [default: all]"),
        click.option("--attention", type=click.Choice(ATTENTIONS), default=_DEFAULTS.attention, show_default=True),
    ]
    command = calibration_options(gate_options(command))
    for option in reversed(options):
        command = option(command)
    return command


def gate_options(command: Any) -> Any:
    """On what, and by which limits, a quantised engine is judged: `QuantizeConfig`'s `limits`, `text`, `generate`, and
    its `samples` as `gate_samples`."""
    options = [
        click.option("--gate-limits", "limits", type=_FILE, help="TOML with limits of the accuracy gate."),
        click.option("--gate-text", "text", type=_FILE, help="Text on which a decoder is judged."),
        click.option("--gate-samples", "gate_samples", type=_FILE, help="An .npz, perhaps with labels, for others."),
        click.option("--gate-tokens", "generate", type=int, default=_DEFAULTS.generate, show_default=True),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def quantize_from_options(options: dict[str, Any]) -> QuantizeConfig | None:
    """Of the options of `quantize_options`, which it takes out of `options`; None where nothing is to be quantised."""
    calibration = config_from_options(options)
    specs = options.pop("specs")
    names = ("plan", "table", "keep", "keep_ends", "search", "findings", "group_size", "rounding", "smooth")
    given = {name: options.pop(name) for name in (*names, "limits", "text", "generate", "kv_limit", "attention")}
    quant, samples = options.pop("quant"), options.pop("gate_samples")
    kv: KvScheme = options.pop("kv") or ""
    if quant in (None, "none") and given["plan"] is None and not kv and given["attention"] != "bf16":
        return None
    return QuantizeConfig(quant=quant or "none", kv=kv, specs=specs, calibration=calibration, samples=samples, **given)
