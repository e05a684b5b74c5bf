"""The search for SmoothQuant's alphas in a build: rows of real activations, and what is found written into plans."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from passes.quantization.plan import LayerPlan, PrecisionPlan
from passes.quantization.smooth_search import INTEGER_ACTIVATIONS, activations_to_search, search_smoothing
from passes.quantization.support import Kernels
from passes.quantization.table import CalibrationTable
from pipeline.calibration.observe import ObserveConfig
from pipeline.calibration.rows import rows_of
from pipeline.calibration.running import prepared_graph
from pipeline.calibration.samples import CalibrationSet
from pipeline.calibration.subject import CalibrationModel
from pipeline.progress import Progress
from pipeline.quantize.choices import Choices
from pipeline.quantize.config import QuantizeConfig


def layers_to_smooth(config: QuantizeConfig, choices: Choices, kernels: Kernels) -> dict[str, LayerPlan]:
    """The layers whose alpha is to be searched, with their first choice.

    Unless the user says otherwise those with one scale for a whole row, or for a tensor: groups do without.
    """
    if config.smooth not in (None, "search"):
        return {}
    schemes: Sequence[str] = ("w8a8",)
    if config.smooth == "search" or (kernels == "cuda-plugins" and config.rounding != "gptq"):
        schemes = INTEGER_ACTIVATIONS
    return {name: plans[0] for name, plans in choices.plans.items() if plans[0].scheme in schemes}


def smoothed(
    choices: Choices,
    layers: Mapping[str, LayerPlan],
    model: CalibrationModel,
    data: CalibrationSet,
    table: CalibrationTable,
    kernels: Kernels,
    config: ObserveConfig,
    progress: Progress,
) -> Choices:
    """The same choices, those of `layers` with the alphas with which least is lost."""
    graph, plan = prepared_graph(model), PrecisionPlan(model.model.sha256, layers)
    rows = rows_of(model, data, config, activations_to_search(graph, plan), progress=progress)
    alphas: dict[str, float | None] = {}
    with progress.stage("search SmoothQuant's alphas") as update:
        for number, found in enumerate(search_smoothing(graph, plan, table, rows, kernels), 1):
            update(f"{number} of {len(rows)}")
            alphas |= dict.fromkeys(found.layers, found.alpha)
    count = sum(alpha is not None for alpha in alphas.values())
    progress.note(f"{count} of {len(layers)} layers lose less with smoothed activations")
    plans = {
        name: tuple(replace(option, smooth=alphas.get(name, option.smooth)) for option in options)
        for name, options in choices.plans.items()
    }
    return replace(choices, plans=plans)
