"""Which product a layer takes at which batch on one device: what was measured, and what follows from it.

scripts/bench_cuda_quant.py measures and writes the table; a build or `kiln tune` reads it and sets the attributes of
`plugins.dense.schema` and `plugins.quant_matmul.cuda_schema`. choices/ holds the tables of SKUs that were measured, for
a decoder of Llama-8B's shape. Knows neither devices nor graphs.

Candidates are named: "dense" and "cublas" (16-bit weights), a format of cuda_schema.FORMATS (its kernels, 16-bit rows),
and a format followed by " w8a8" (quantised rows).
"""

import json
import math
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from plugins.errors import KilnError
from plugins.quant_matmul.cuda_schema import FORMATS, KERNEL_ROWS, WeightFormat

SIXTEEN_BITS = ("dense", "cublas")
_VERSION = 1
_RECORDED = Path(__file__).parent / "choices"


@dataclass(frozen=True)
class Measured:
    """One layer's products at one batch."""

    layer: str
    width: int
    depth: int
    swiglu: bool
    batch: int
    microseconds: dict[str, float]
    """Of one call, by candidate."""

    def best(self, formats: Collection[str]) -> str:
        """The fastest of the candidates with weights of one of these formats. Raises KilnError where none was timed."""
        fitting = {name: time for name, time in self.microseconds.items() if name.split()[0] in formats}
        if not fitting:
            raise KilnError(
                f"layer {self.layer} at batch {self.batch} was measured for {', '.join(self.microseconds)}; "
                f"expected some of {', '.join(formats)}"
            )
        return min(fitting, key=lambda name: fitting[name])

    def is_timed(self, form: str) -> bool:
        return any(name.split()[0] == form for name in self.microseconds)

    def gain(self, formats: Collection[str]) -> float:
        """Time of the best of these formats over that of 16 bits: below 1 it wins."""
        return self.microseconds[self.best(formats)] / self.microseconds[self.best(SIXTEEN_BITS)]


@dataclass(frozen=True)
class Choice:
    """What one layer takes: weights of one format, by the kernels up to `kernel_rows` rows, by W8A8 beyond."""

    format: WeightFormat | None
    """None: 16 bits."""
    kernel_rows: int


@dataclass(frozen=True)
class Choices:
    """Everything that was measured on one device."""

    device: str
    measured: tuple[Measured, ...]

    def of_layer(self, layer: str, formats: Collection[WeightFormat] = FORMATS) -> Choice:
        """What serves `layer` best, of the formats that are accurate enough for it.

        A format must not be slower than 16 bits at any batch that was measured; among those the least mean of
        logarithms of times wins. Raises KilnError for a layer that was not measured.
        """
        rows = sorted((one for one in self.measured if one.layer == layer), key=lambda one: one.batch)
        if not rows:
            known = sorted({one.layer for one in self.measured})
            raise KilnError(f"layer {layer} was not measured on {self.device}; expected one of {', '.join(known)}")
        sixteen = Choice(None, max((one.batch for one in rows if one.best(SIXTEEN_BITS) == "dense"), default=0))
        fitting = [form for form in formats if all(one.is_timed(form) and one.gain((form,)) <= 1 for one in rows)]
        if not fitting:
            return sixteen
        form = min(fitting, key=lambda name: sum(math.log(one.microseconds[one.best((name,))]) for one in rows))
        return Choice(form, self.fastest_rows(layer, form))

    def fastest_rows(self, layer: str, form: WeightFormat) -> int:
        """The most rows that were measured for which a format's kernels are faster than its W8A8; 0 for none.

        At most KERNEL_ROWS: more the operators do not take.
        """
        timed = [one for one in self.measured if one.layer == layer and one.is_timed(form)]
        fastest = [one.batch for one in timed if one.best((form,)) == form]
        return min(max(fastest, default=0), KERNEL_ROWS)

    def to_json(self) -> str:
        """One line for each layer and batch, times to a tenth of a microsecond, and which candidate won."""
        lines = ",\n  ".join(json.dumps(row) for row in self._rows())
        return f'{{"version": {_VERSION}, "device": {json.dumps(self.device)}, "measured": [\n  {lines}\n]}}\n'

    def _rows(self) -> Iterator[dict[str, object]]:
        for one in self.measured:
            times = {name: round(time, 1) for name, time in one.microseconds.items()}
            yield {**asdict(one), "microseconds": times, "choice": one.best((*SIXTEEN_BITS, *FORMATS))}

    @staticmethod
    def from_json(text: str) -> "Choices":
        """Raises KilnError for what `to_json` did not write."""
        try:
            data = json.loads(text)
            version = data["version"]
            rows = [{name: value for name, value in row.items() if name != "choice"} for row in data["measured"]]
            choices = Choices(data["device"], tuple(Measured(**row) for row in rows))
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise KilnError(
                f"a table of measured products cannot be read ({problem}); "
                "expected what scripts/bench_cuda_quant.py writes"
            ) from problem
        if version != _VERSION:
            raise KilnError(f"a table of measured products has version {version}; expected {_VERSION}: measure again")
        return choices


def recorded(sku: str) -> Choices | None:
    """What was measured for a SKU (`h200`), or None where nobody has."""
    path = _RECORDED / f"{sku}.json"
    return Choices.from_json(path.read_text()) if path.is_file() else None
