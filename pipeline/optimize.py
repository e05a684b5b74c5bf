"""Runs the graph passes of a SKU over an ONNX file, judged and timed by running it. Knows no pass by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engines.sku import Sku
from passes.base import Pass
from passes.manager import PassReport, run_passes
from passes.onnx_model import OnnxModel
from passes.standard import TABLE, Backend, Entry, IoLayout, PassSwitches, PassTarget, Precision, standard_passes
from pipeline.verify import LONG, Feeds, NumericGate, StepClock
from plugins.build import cpu_library
from plugins.errors import KilnError

LINEAR_ROWS = {"sm_90": 32}
"""By architecture, where Kiln's products were measured to be faster than cuBLAS (on an H200); `kiln tune` measures it
for the engine at hand."""


@dataclass(frozen=True)
class OptimizeConfig:
    """`verify` runs the model before and after each pass and undoes what errs; `measure` times it as well."""

    switches: PassSwitches = field(default_factory=PassSwitches)
    precision: Precision = "fp32"
    io_layout: IoLayout = "nchw"
    verify: bool = True
    measure: bool = False
    threads: int | None = None
    long_tokens: int = LONG
    """Of the longest prompt on which a decoder's passes are judged."""


def optimize(
    model: OnnxModel,
    target: Path,
    sku: Sku,
    config: OptimizeConfig = OptimizeConfig(),
    inputs: Sequence[Feeds] | None = None,
    observe: Callable[[PassReport], None] = lambda report: None,
    table: Sequence[Entry] = TABLE,
    first: Sequence[Pass] = (),
) -> tuple[OnnxModel, tuple[PassReport, ...]]:
    """Rewrite the graph into `target`. `inputs` replaces the generated inputs of a model without a KV cache.

    The passes are `first` and then those of `table`.

    Graphs for GPUs are judged on this machine's CPU, which has all of their operators.
    Raises KilnError for a model that is not sound, an unknown pass, or a model that cannot be run here.
    """
    if config.measure and not sku.is_cpu:
        raise KilnError(f"this machine cannot time graphs for SKU {sku.name}; leave --measure out")
    by_range = config.precision == "fp16"  # BF16 holds what FP32 holds
    runs = config.verify or config.measure or by_range
    plugins = [cpu_library()] if model.decoder and runs else []
    gate = NumericGate(model, plugins, inputs, sku.is_cpu, config.long_tokens) if config.verify or by_range else None
    return run_passes(
        model,
        target,
        [*first, *standard_passes(target_for(model, sku, config, gate), config.switches, table)],
        gate=gate if config.verify else None,
        noise=gate.noise if gate else None,
        clock=StepClock(model, plugins, gate.inputs if gate else inputs, config.threads) if config.measure else None,
        observe=observe,
    )


def target_for(model: OnnxModel, sku: Sku, config: OptimizeConfig, gate: NumericGate | None = None) -> PassTarget:
    """What decides which passes a model gets for a machine type."""
    return PassTarget(
        backend=_backend_of(sku),
        decoder=model.decoder,
        precision=config.precision,
        io_layout=config.io_layout,
        linear_rows=LINEAR_ROWS.get(sku.arch, 0),
        measure_ranges=gate.ranges if gate else None,
    )


def _backend_of(sku: Sku) -> Backend:
    if sku.is_cpu:
        return "cpu"
    return "tensorrt" if sku.backend == "tensorrt" else "cuda"
