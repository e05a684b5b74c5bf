"""What the steps of quantising share: a graph with its data; and what comes of them: a plan with its passes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from passes.attention_precision import AttentionPrecision
from passes.base import Pass
from passes.bind_linear import gated_products
from passes.quantization.layers import Layer, layers_of, name_layers
from passes.quantization.plan import LayerPlan, PrecisionPlan
from passes.quantization.rewrite import kernels_of, needs_ranges, quantising_passes
from passes.quantization.table import CalibrationTable, table_from_json
from passes.quantize_cache import QuantizeCache
from passes.quantize_linear import QuantizeLinear
from passes.standard import PassTarget
from pipeline.calibration import calibrate
from pipeline.calibration.calibrating import covered_set
from pipeline.calibration.moments import moments_of
from pipeline.calibration.running import prepared_graph
from pipeline.calibration.samples import CalibrationSet
from pipeline.calibration.subject import CalibrationModel
from pipeline.progress import Progress
from pipeline.quantize.candidates import candidate
from pipeline.quantize.config import QuantizeConfig
from pipeline.quantize.material import ORIGIN, default_text
from pipeline.quantize.sku_speed import SkuSpeed, Speed
from pipeline.verify import StepClock
from plugins.errors import KilnError


@dataclass(frozen=True)
class Quantisation:
    """A plan for one graph and what it rests on."""

    plan: PrecisionPlan
    table: CalibrationTable | None
    layers: tuple[Layer, ...]
    target: PassTarget
    moments: Mapping[str, NDArray]
    subject: CalibrationModel
    specs: Callable[[], tuple[str, ...]]
    """Names the data on which the model was or would be calibrated. Raises KilnError where there is none."""
    config: QuantizeConfig
    attends_in_bf16: bool
    unmeasured: int = 0
    """Quantised layers whose speed is not known on the SKU."""

    def passes(self, keep: Sequence[str] = ()) -> list[Pass]:
        """Those that apply the plan, with more layers kept float; for a GPU the first of them."""
        plan = self._keeping(keep)
        # Before the others: behind them one row that is rounded the other way looks like an error of attention.
        passes: list[Pass] = [AttentionPrecision("bfloat16")] if self.attends_in_bf16 else []
        passes += quantising_passes(plan, self.table, self.moments, self.target)
        if plan.kv and self.target.backend != "cuda":
            values = plan.kv == "int8-kv"
            passes.append(QuantizeCache(self.target.decoder, values=values, max_context=self.config.kv_limit))
        return passes

    def bound(self, keep: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
        """For a GPU: the passes that follow once its operators are bound, by name, with their options."""
        plan, found = self._keeping(keep), dict[str, dict[str, Any]]()
        if plan.quantised:
            found[QuantizeLinear.name] = {"plan": plan, "moments": self.moments}
        if plan.kv:
            found[QuantizeCache.name] = {"values": plan.kv == "int8-kv", "max_context": self.config.kv_limit}
        return found

    def _keeping(self, keep: Sequence[str]) -> PrecisionPlan:
        return self.plan.keeping(keep, "kept to pass the gate") if keep else self.plan

    @property
    def schemes(self) -> tuple[str, ...]:
        """In use, the cache's included."""
        found = {layer.scheme for layer in self.plan.layers.values() if layer.scheme != "float"}
        return (*sorted(found), *((self.plan.kv,) if self.plan.kv else ())) or ("float",)


class Stage:
    """What the steps share."""

    def __init__(
        self,
        model: CalibrationModel,
        target: PassTarget,
        config: QuantizeConfig,
        folder: Path,
        threads: int | None,
        progress: Progress,
        speed: SkuSpeed | None,
    ) -> None:
        self.model, self.target, self.config, self.speed = model, target, config, speed
        self.folder, self.threads, self.progress = folder, threads, progress
        graph = prepared_graph(model)
        name_layers(graph)
        self.layers = layers_of(graph)
        self.gated = gated_products(graph)
        self._data: CalibrationSet | None = None

    @property
    def sha256(self) -> str:
        return self.model.model.sha256

    @cached_property
    def specs(self) -> tuple[str, ...]:
        if self.config.specs:
            return self.config.specs
        if not self.model.takes_tokens or self.model.tokenizer is None:
            raise KilnError(
                "this model's calibration data cannot be made up; give --calibration: images, .npz batches, token ids "
                "or module:callable"
            )
        path = self.folder / "calibration.txt"
        path.write_text(default_text(), encoding="utf-8")
        self.progress.note(f"calibration data: {ORIGIN}")
        return (f"text:{path}",)

    def result(
        self, plan: PrecisionPlan, table: CalibrationTable | None, moments: Mapping[str, NDArray]
    ) -> Quantisation:
        return Quantisation(
            plan,
            table,
            tuple(self.layers),
            self.target,
            moments,
            self.model,
            lambda: self.specs,
            self.config,
            self._attends_in_bf16(plan),
            sum(not self.speed_of(name, plan.of(name)).measured for name in plan.quantised) if self.speed else 0,
        )

    def speed_of(self, name: str, plan: LayerPlan) -> Speed:
        """A layer's on a GPU that is not at hand."""
        assert self.speed is not None
        layer = next(layer for layer in self.layers if layer.name == name)
        return self.speed.of(layer, name in self.gated, plan)

    def _attends_in_bf16(self, plan: PrecisionPlan) -> bool:
        """As the user says; by default where layers are quantised and a prompt is measured to take less time so."""
        if self.model.decoder is None or self.target.backend != "cpu" or self.config.attention == "fp32":
            return False
        if self.config.attention == "bf16" or not plan.quantised:
            return self.config.attention == "bf16"
        path = self.model.model.path
        with self.progress.stage("time attention"), candidate(path, plan, lambda plan: [AttentionPrecision()]) as other:
            timing = StepClock(self.model.model, self.model.plugins, threads=self.threads)(path, other)
        self.progress.detail(f"a prompt takes {timing.before * 1e3:.1f} ms, {timing.after * 1e3:.1f} attending in BF16")
        return timing.pays is True

    def data(self) -> CalibrationSet:
        if self._data is None:
            self._data = covered_set(self.specs, self.model, self.config.calibration, self.progress)[0]
        return self._data

    def table(self, plans: Sequence[LayerPlan], required: bool = False) -> CalibrationTable | None:
        """The user's, or one made now where a plan needs it or it is `required`."""
        if self.config.table is not None:
            table = table_from_json(self.config.table)
            table.require_model(self.sha256)
            return table
        kernels = kernels_of(self.target)
        needed = any(needs_ranges(p, kernels) or p.smooth is not None or p.rounding == "awq" for p in plans)
        if not (required or needed):
            return None
        config = self.config.calibration
        if any(layer.kind == "Conv" for layer in self.layers):  # all of such a network is computed in integers
            config = replace(config, observe=replace(config.observe, everything=True))
        found = calibrate(self.specs, self.model, config, self.progress)
        self._data = found.data
        return found.table

    def moments(self, plans: Mapping[str, Sequence[LayerPlan]]) -> dict[str, NDArray]:
        names = [name for name, options in plans.items() if any(plan.rounding in ("gptq", "awq") for plan in options)]
        if not names:
            return {}
        observe = self.config.calibration.observe
        found = moments_of(self.model, self.data(), observe, names, progress=self.progress)
        return {layer: item.second for item in found for layer in item.layers}
