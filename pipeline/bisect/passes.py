"""Passes as the parts of a search: A is a model as it is, B the same with every pass of a machine type."""

import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from engines.sku import Sku
from passes.onnx_model import OnnxModel
from passes.standard import PassSwitches
from pipeline.bisect.search import Measure, Part
from pipeline.optimize import OptimizeConfig, optimize
from pipeline.progress import Progress

_NEEDED = "bind_attention"
"""Without it a serving graph does not run on a CPU; it changes no number."""


class PassParts:
    """Implements `pipeline.bisect.search.Parts`; the numbers are those of the passes that change the model."""

    def __init__(self, model: OnnxModel, sku: Sku, measure: Measure, progress: Progress) -> None:
        self._model, self._sku, self._measure, self._progress = model, sku, measure, progress
        self._errors: dict[frozenset[int], float] = {}
        with tempfile.TemporaryDirectory(prefix="kiln-bisect-") as folder:
            _, reports = optimize(model, Path(folder) / "all.onnx", sku, OptimizeConfig(verify=False))
        self._names = list(dict.fromkeys(report.name for report in reports))
        changing = {report.name for report in reports if report.changed} - {_NEEDED}
        self.total = len(self._names)
        self.changed: Sequence[int] = [number for number, name in enumerate(self._names) if name in changing]

    def part(self, number: int) -> Part:
        return Part(number, (self._names[number],))

    def error(self, of_b: Collection[int]) -> float:
        key = frozenset(of_b)
        if key not in self._errors:
            only = (_NEEDED, *(self._names[number] for number in sorted(key)))
            config = OptimizeConfig(PassSwitches(only=only), verify=False)
            with tempfile.TemporaryDirectory(prefix="kiln-bisect-") as folder:
                path = optimize(self._model, Path(folder) / "some.onnx", self._sku, config)[0].path
                self._errors[key] = self._measure(path)
            self._progress.detail(f"{', '.join(only[1:])}: error {self._errors[key]:.3g}")
        return self._errors[key]
