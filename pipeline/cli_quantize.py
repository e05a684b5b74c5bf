"""The options of `build-engine` that quantise."""

from pathlib import Path
from typing import Any, get_args

import click

from passes.quantization.plan import Rounding
from pipeline.cli_calibrate import calibration_options, config_from_options
from pipeline.quantize.config import QUANTS, SEARCHES, QuantizeConfig

_DEFAULTS = QuantizeConfig()
_FILE = click.Path(path_type=Path)


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
            help="Quantise all layers that get faster, or those of them whose measured sensitivity allows it.",
        ),
        click.option("--findings", type=_FILE, help="File that keeps measured sensitivities, to go on after a break."),
        click.option("--group-size", type=int, help="Products that share a scale.  [default: by scheme]"),
        click.option(
            "--rounding", type=click.Choice(get_args(Rounding)), default=_DEFAULTS.rounding, show_default=True
        ),
        click.option("--smooth", type=float, help="SmoothQuant's alpha, 0 to 1.  [default: off]"),
        click.option("--gate-limits", "limits", type=_FILE, help="TOML with limits of the accuracy gate."),
        click.option("--gate-text", "text", type=_FILE, help="Text on which a decoder is judged."),
        click.option("--gate-samples", "gate_samples", type=_FILE, help="An .npz, perhaps with labels, for others."),
        click.option("--gate-tokens", "generate", type=int, default=_DEFAULTS.generate, show_default=True),
    ]
    command = calibration_options(command)
    for option in reversed(options):
        command = option(command)
    return command


def quantize_from_options(options: dict[str, Any]) -> QuantizeConfig | None:
    """Of the options of `quantize_options`, which it takes out of `options`; None without --quant and --plan."""
    calibration = config_from_options(options)
    specs = options.pop("specs")
    names = ("plan", "table", "keep", "keep_ends", "search", "findings", "group_size", "rounding", "smooth")
    given = {name: options.pop(name) for name in (*names, "limits", "text", "generate")}
    quant, samples = options.pop("quant"), options.pop("gate_samples")
    if quant is None and given["plan"] is None:
        return None
    return QuantizeConfig(
        quant=quant or _DEFAULTS.quant, specs=specs, calibration=calibration, samples=samples, **given
    )
