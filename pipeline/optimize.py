"""Runs the graph passes of a SKU over an ONNX file, judged and timed by running it. Knows no pass by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engines.sku import Sku
from passes.manager import PassReport, run_passes
from passes.onnx_model import OnnxModel
from passes.standard import Backend, PassSwitches, PassTarget, standard_passes
from pipeline.verify import Feeds, NumericGate, StepClock
from plugins.build import cpu_library
from plugins.errors import KilnError

_BACKENDS: dict[str, Backend] = {"CPUExecutionProvider": "cpu", "CUDAExecutionProvider": "cuda"}


@dataclass(frozen=True)
class OptimizeConfig:
    """`verify` runs the model before and after each pass and undoes what errs; `measure` times it as well."""

    switches: PassSwitches = field(default_factory=PassSwitches)
    verify: bool = True
    measure: bool = False
    threads: int | None = None


def pass_target(sku: Sku, model: OnnxModel) -> PassTarget:
    """What decides the passes of a model for a SKU."""
    return PassTarget(_BACKENDS[sku.provider], model.decoder)


def optimize(
    model: OnnxModel,
    target: Path,
    sku: Sku,
    config: OptimizeConfig = OptimizeConfig(),
    inputs: Sequence[Feeds] | None = None,
    observe: Callable[[PassReport], None] = lambda report: None,
) -> tuple[OnnxModel, tuple[PassReport, ...]]:
    """Rewrite the graph into `target`. `inputs` replaces the generated inputs of a model without a KV cache.

    Raises KilnError for a model that is not sound, an unknown pass, or a model that cannot be run here.
    """
    passes = standard_passes(pass_target(sku, model), config.switches)
    if (config.verify or config.measure) and not sku.is_cpu:
        raise KilnError(f"graphs for SKU {sku.name} cannot be run on this machine; add --no-verify, without --measure")
    plugins = [cpu_library()] if model.decoder and (config.verify or config.measure) else []
    return run_passes(
        model,
        target,
        passes,
        gate=NumericGate(model, plugins, inputs) if config.verify else None,
        clock=StepClock(model, plugins, inputs, config.threads) if config.measure else None,
        observe=observe,
    )
