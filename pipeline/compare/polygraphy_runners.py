"""Polygraphy runners around subjects, and the per-output comparison through Polygraphy's Comparator.

Polygraphy pairs the outputs and judges every element; this module feeds it one sample at a time
(streaming), so only one sample's outputs of both sides are in memory.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.compare.report import OutputRow
from pipeline.compare.subjects import DecoderSubject, PlainSubject
from pipeline.compare.tolerance import Tolerances
from plugins.errors import KilnError
from plugins.paged_attention.schema import LOGITS

Feeds = Mapping[str, NDArray]
TOKENS = "input_ids"


def runner_from_subject(subject: PlainSubject | DecoderSubject, label: str, chunk: int) -> Any:
    """A Polygraphy BaseRunner. For a decoder one feed is `{"input_ids": int64 [tokens]}`, its output `logits`."""
    from polygraphy.backend.base import BaseRunner
    from polygraphy.common import TensorMetadata

    class SubjectRunner(BaseRunner):
        """Runs a subject that its caller opened and will close."""

        def get_input_metadata_impl(self) -> TensorMetadata:
            metadata = TensorMetadata()
            if isinstance(subject, DecoderSubject):
                metadata.add(TOKENS, dtype=np.dtype(np.int64), shape=(None,))
                return metadata
            for record in subject.inputs:
                shape = tuple(size if isinstance(size, int) else None for size in record.shape)
                metadata.add(record.name, dtype=np.dtype(record.dtype), shape=shape)
            return metadata

        def infer_impl(self, feed_dict: Feeds) -> "OrderedDict[str, NDArray]":
            start = time.perf_counter()
            if isinstance(subject, DecoderSubject):
                rows = list(subject.logits(feed_dict[TOKENS].tolist(), chunk))
                outputs = OrderedDict({LOGITS: np.concatenate(rows)})
            else:
                outputs = OrderedDict(subject.infer(feed_dict))
            self.inference_time = time.perf_counter() - start
            return outputs

    return SubjectRunner(name=label)


def compare_outputs(
    a: PlainSubject | DecoderSubject,
    b: PlainSubject | DecoderSubject,
    samples: Iterable[Feeds],
    tolerances: Tolerances,
    chunk: int,
) -> tuple[OutputRow, ...]:
    """Run both sides on every sample and compare output by output, element by element."""
    from polygraphy.comparator import Comparator, SimpleCompareFunc
    from polygraphy.exception import PolygraphyException
    from polygraphy.logger import G_LOGGER

    tracks: dict[str, _Track] = {}
    simple = SimpleCompareFunc(
        atol=tolerances.atol.value,
        rtol=tolerances.rtol.value,
        check_error_stat="elemwise",
        infinities_compare_equal=True,
        find_output_func=lambda name, index, other: [_partner(name, index, list(other))],
    )

    def compare(result_a: Any, result_b: Any) -> "OrderedDict[str, Any]":
        names_a, names_b = list(result_a), list(result_b)
        _require_pairs(a, b, names_a, names_b)
        verdicts = simple(result_a, result_b)
        for index, name in enumerate(names_a):
            partner = _partner(name, index, names_b)
            track = tracks.setdefault(name, _Track(name, note=f"B's {partner}" if partner != name else ""))
            track.add(result_a[name], result_b[partner], verdicts[name])
        return verdicts

    runners = [runner_from_subject(a, "A", chunk), runner_from_subject(b, "B", chunk)]
    # Infinities and NaN are findings, not worth a warning from every statistic that meets them.
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1), np.errstate(all="ignore"):
        try:
            stream: Iterator[Any] = Comparator.run(runners, data_loader=list(samples), streaming=True)
            Comparator.compare_accuracy(stream, compare_func=compare)
        except PolygraphyException as error:
            raise KilnError(f"polygraphy could not compare {a.side.name} with {b.side.name}: {error}") from error
    return tuple(track.row() for track in tracks.values())


def _partner(name: str, index: int, others: list[str]) -> str:
    """B's output of the same name, else the one in the same place."""
    return name if name in others else others[index]


def _require_pairs(
    a: PlainSubject | DecoderSubject, b: PlainSubject | DecoderSubject, names_a: list[str], names_b: list[str]
) -> None:
    """Every output needs a partner of its own: same names, or none in common and the same number."""
    if set(names_a) != set(names_b) and (len(names_a) != len(names_b) or set(names_a) & set(names_b)):
        raise KilnError(
            f"{a.side.name} has the outputs {', '.join(names_a)}, {b.side.name} has {', '.join(names_b)}; "
            "both must have the same ones: export again, or name them alike"
        )


@dataclass
class _Track:
    """Errors of one output, gathered over samples."""

    name: str
    shape: str = ""
    max_abs: float = 0.0
    sum_abs: float = 0.0
    median_abs: float = 0.0
    max_rel: float = 0.0
    elements: int = 0
    passed: bool = True
    note: str = ""

    def add(self, a: NDArray, b: NDArray, verdict: Any) -> None:
        self.passed = self.passed and bool(verdict)
        self.shape = self.shape or "x".join(map(str, a.shape)) or "scalar"
        if isinstance(verdict, bool):  # Polygraphy's answer to shapes that differ
            self.note = f"shapes differ: A gave {list(a.shape)}, B gave {list(b.shape)}"
            self.max_abs = self.sum_abs = self.median_abs = self.max_rel = math.nan
            return
        for label, array in (("A", a), ("B", b)):
            if array.dtype.kind == "f" and (count := int(np.isnan(array).sum())):
                self.note = f"{count} of {array.size} values of {label} are NaN"
        self.max_abs = _larger(self.max_abs, verdict.max_absdiff)
        self.median_abs = _larger(self.median_abs, verdict.median_absdiff)
        self.max_rel = _larger(self.max_rel, verdict.max_reldiff)
        self.sum_abs += verdict.mean_absdiff * a.size
        self.elements += a.size

    def row(self) -> OutputRow:
        mean = self.sum_abs / self.elements if self.elements else math.nan
        return OutputRow(
            name=self.name,
            shape=self.shape,
            max_abs=self.max_abs,
            mean_abs=mean,
            median_abs=self.median_abs,
            max_rel=self.max_rel,
            elements=self.elements,
            passed=self.passed,
            note=self.note,
        )


def _larger(x: float, y: float) -> float:
    return math.nan if math.isnan(x) or math.isnan(y) else max(x, y)
