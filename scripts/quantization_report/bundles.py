"""Bundles of one model: the float one, built as users build it, and quantised ones made from its graph.

A quantised bundle is made by the functions that `build-engine --quant` calls, with two differences: the float model is
not exported again, and one that the gate refuses is written all the same, because its figures are what is asked for.
"""

import shutil
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from engines.bundle import EngineBundle, file_records, open_bundle, write_bundle
from engines.manifest import Manifest, TensorRecord
from engines.runtime.tokenizer import Tokenizer
from engines.sku import resolve_sku
from passes.manager import link_or_copy
from passes.onnx_model import OnnxModel, onnx_model_from_path
from pipeline.build import build
from pipeline.config import BuildConfig
from pipeline.gate.report import GateReport
from pipeline.optimize import OptimizeConfig, target_for
from pipeline.pass_report import record_from_report
from pipeline.progress import Progress
from pipeline.quantize.building import rewritten, written
from pipeline.quantize.config import QuantizeConfig
from pipeline.quantize.judging import judge_engine
from pipeline.quantize.stage import quantisation_for
from pipeline.quantize.state import Quantisation
from plugins.build import cpu_library

_SKU = "cpu"
INTEGER_PRODUCTS = ("w8a8", "w8a8-dynamic", "w4a8-dynamic")
"""Schemes whose products are of integers."""


@dataclass(frozen=True)
class Made:
    """One quantised bundle, how it was planned, and what the gate said; `gate` is None where it was not asked."""

    bundle: EngineBundle
    planned: Quantisation
    gate: GateReport | None

    @property
    def integer_products(self) -> float:
        """Share of the layers whose products are of integers."""
        plan, layers = self.planned.plan, self.planned.layers
        return sum(plan.of(layer.name).scheme in INTEGER_PRODUCTS for layer in layers) / len(layers)

    @property
    def schemes(self) -> str:
        """Layers by scheme, in words."""
        counts = Counter(self.planned.plan.of(layer.name).scheme for layer in self.planned.layers)
        return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


@dataclass(frozen=True)
class Maker:
    """Makes all bundles of one model below `folder`."""

    spec: str
    """What `build-engine` would be given."""
    folder: Path
    threads: int
    progress: Progress
    asks_gate: bool = True
    inputs: Path | None = None
    parents: list[EngineBundle] = field(default_factory=list)

    @property
    def parent(self) -> EngineBundle:
        """The float bundle, built when it is first asked for."""
        if not self.parents:
            out = self.folder / "float"
            build(self.spec, [_SKU], BuildConfig(out=out, verify_passes=False, inputs=self.inputs), self.progress)
            self.parents.append(open_bundle(out))
        return self.parents[0]

    @property
    def model(self) -> OnnxModel:
        return onnx_model_from_path(self.parent.engine_path)

    def make(self, name: str, config: QuantizeConfig) -> Made:
        """Raises KilnError for what cannot be quantised so."""
        parent, kept = self.parent, []
        self.progress.note(f"{parent.manifest.name} as {name}")

        def fill(folder: Path) -> Manifest:
            for file in parent.manifest.files:
                if not file.startswith(parent.manifest.engine):
                    (folder / file).parent.mkdir(parents=True, exist_ok=True)
                    link_or_copy(parent.path / file, folder / file)
            manifest, made, gate = self._filled(folder, config)
            kept.append((made, gate))
            return manifest

        bundle = write_bundle(self.folder / name.replace(" ", "-").replace(",", ""), fill)
        return Made(bundle, *kept[0])

    def _filled(self, folder: Path, config: QuantizeConfig) -> tuple[Manifest, Quantisation, GateReport | None]:
        parent, progress = self.parent.manifest, self.progress
        engine = folder / parent.engine
        found = planned(self.model, config, folder / "work", self.tokenizer, self.threads, progress)
        with progress.stage("quantise"):
            made, reports = rewritten(self.model, engine, found, resolve_sku(_SKU), self._passes)
        gate = None
        if self.asks_gate:
            gate = judge_engine(
                self.model, engine, found.schemes, found.subject, found.specs, config, None, progress, self.threads
            )
            progress.note(gate.sentence())
        shutil.rmtree(folder / "work")
        record = None if gate is None else written(folder, found, gate)
        update = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "parent": self.parent.sha256,
            "inputs": tuple(map(TensorRecord.of, made.inputs)),
            "outputs": tuple(map(TensorRecord.of, made.outputs)),
            "decoder": made.decoder,
            "passes": (*parent.passes, *(record_from_report(report) for report in reports)),
            "quantization": record,
            "files": file_records(folder),
        }
        return parent.model_copy(update=update), found, gate

    @property
    def tokenizer(self) -> Tokenizer | None:
        path = self.parent.tokenizer_path
        return Tokenizer(path) if path else None

    @property
    def _passes(self) -> OptimizeConfig:
        return OptimizeConfig(verify=False, threads=self.threads)


def planned(
    model: OnnxModel,
    config: QuantizeConfig,
    work: Path,
    tokenizer: Tokenizer | None,
    threads: int,
    progress: Progress,
) -> Quantisation:
    """Calibrate and plan, with temporary files in the new folder `work`."""
    work.mkdir()
    passes = OptimizeConfig(verify=False, threads=threads)
    target = target_for(model, resolve_sku(_SKU), passes)
    plugins = [cpu_library()] if model.decoder is not None else []
    return quantisation_for(model, plugins, tokenizer, target, config, work, progress, threads)


def weight_bytes(bundle: EngineBundle) -> int:
    """Bytes of the graph and its weights."""
    engine = bundle.manifest.engine
    return sum(record.bytes for name, record in bundle.manifest.files.items() if name.startswith(engine))
