"""A plan cut to what the accuracy limits allow: the layers that add most noise by themselves stay float.

Float and quantised graph run side by side once, which ranks all layers; after that each trial is judged whole. For
targets that this machine cannot time, and where measuring each layer alone takes too long. Knows no limit by itself.
"""

from collections.abc import Callable

from passes.quantization.plan import PrecisionPlan
from pipeline.calibration.samples import TOKENS, Sample
from pipeline.calibration.subject import CalibrationModel
from pipeline.gate.graphs import GraphFile
from pipeline.gate.keep import rank_layers
from pipeline.gate.layers import LayerRow, decoder_layers, plain_layers
from pipeline.quantize.candidates import Rewrites, candidate, rescaling
from pipeline.smallest import smallest_set

TRIALS = 12
_CHUNK = 128
"""Tokens a step while layers are compared: all of their outputs are in memory for one step."""


def trimmed(
    plan: PrecisionPlan,
    model: CalibrationModel,
    rewrites: Rewrites,
    sample: Sample,
    cost: Callable[[PrecisionPlan], float],
    allowed: float,
    threads: int | None = None,
    observe: Callable[[str], None] = lambda text: None,
) -> PrecisionPlan:
    """The plan with as few layers kept float as `cost` of the whole takes to be at most `allowed`.

    `sample` is what layers are ranked on. Where no set that is tried is enough, the best of them: the gate refuses it.
    """
    costs: dict[tuple[str, ...], float] = {}

    def fits(keep: tuple[str, ...]) -> bool:
        costs[keep] = cost(plan.keeping(keep, ""))
        observe(f"{len(keep)} layers float: {costs[keep]:.3g}, at most {allowed:.3g} is allowed")
        return costs[keep] <= allowed

    if fits(()):
        return plan
    ranking = rank_layers([_rows(plan, model, rewrites, sample, threads)])
    ranking = tuple(name for name in ranking if name in plan.quantised)
    keep = smallest_set(ranking[:-1], fits, TRIALS) or min(costs, key=lambda tried: costs[tried])
    return plan.keeping(keep, "too noisy")


def _rows(
    plan: PrecisionPlan, model: CalibrationModel, rewrites: Rewrites, sample: Sample, threads: int | None
) -> list[LayerRow]:
    """Compared with a float graph of the same smoothing, whose tensors have the same scales."""
    path = model.model.path
    with (
        candidate(path, plan, lambda plan: rescaling(rewrites(plan))) as ours,
        candidate(path, plan, rewrites) as theirs,
    ):
        floats, quantised = (GraphFile(file, model.decoder, model.plugins) for file in (ours, theirs))
        if model.decoder is None:
            return plain_layers(floats, quantised, [sample.read()], threads)[0]
        return decoder_layers(floats, quantised, [sample.read()[TOKENS].tolist()], _CHUNK, threads)[0]
