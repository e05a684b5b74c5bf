"""Classifiers and encoders: outputs, first choices, embeddings, and a downstream task, by stratum."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipeline.compare.subjects import PlainSubject
from pipeline.gate.downstream import fit, split
from pipeline.gate.material import PlainData, Sample, Task
from pipeline.gate.metrics import ErrorSums
from plugins.errors import KilnError

_MASK = "attention_mask"


@dataclass(frozen=True)
class PlainFigures:
    """Metrics by name, one sample's weight in those that are shares, and accuracies for people."""

    values: Mapping[str, float]
    resolution: Mapping[str, float]
    facts: Mapping[str, float] = field(default_factory=dict)


def measure_samples(a: PlainSubject, b: PlainSubject, data: PlainData, samples: Iterable[Sample]) -> PlainFigures:
    """Reference `a` and candidate `b` on the same samples.

    Raises KilnError for no samples, labels out of range, and outputs that are no numbers, naming the sample.
    """
    sums, rows = ErrorSums(), _Rows()
    for number, sample in enumerate(samples):
        ours, theirs = (_judged(subject, sample, data, number) for subject in (a, b))
        if ours.shape != theirs.shape:
            raise KilnError(f"the outputs have the shapes {list(ours.shape)} and {list(theirs.shape)} on one sample")
        sums.add(ours, theirs)
        rows.add(ours, theirs, sample, number)
    if not rows.count:
        raise KilnError("a stratum has no samples; give at least one")
    values = {"output_max_error": sums.max_error, "output_cosine": sums.cosine, "output_snr_db": sums.snr_db}
    found = rows.embeddings() if data.kind == "embedding" else rows.choices()
    return PlainFigures({**values, **found.values}, found.resolution, found.facts)


def measure_task(a: PlainSubject, b: PlainSubject, data: PlainData, task: Task) -> PlainFigures:
    """What a classifier of the embeddings loses: trained on the candidate's own, or kept from the reference."""
    ours, theirs, labels = [], [], []
    for number, sample in enumerate(task.samples):
        if sample.labels is None:
            raise KilnError(f"sample {number} of the task '{task.name}' has no labels; every sample needs them")
        ours.append(_judged(a, sample, data, number))
        theirs.append(_judged(b, sample, data, number))
        labels.append(_labels(sample, len(ours[-1]), None, number))
    if not labels:
        raise KilnError(f"the task '{task.name}' has no samples")
    x, y, target = np.concatenate(ours), np.concatenate(theirs), np.concatenate(labels)
    parts = split(target, task.train_share, task.seed)
    learnt, own = fit(x[parts.train], target[parts.train]), fit(y[parts.train], target[parts.train])
    reference = learnt.accuracy(x[parts.test], target[parts.test])
    candidate, kept = (model.accuracy(y[parts.test], target[parts.test]) for model in (own, learnt))
    one = 1.0 / len(parts.test)
    return PlainFigures(
        {"task_drop": reference - candidate, "task_drop_kept": reference - kept},
        {"task_drop": one, "task_drop_kept": one},
        {
            "task accuracy, reference": reference,
            "task accuracy, candidate": candidate,
            "task accuracy, candidate with the reference's classifier": kept,
            "task rows tested": float(len(parts.test)),
        },
    )


class _Rows:
    """What is kept of each row: nothing as large as the outputs."""

    def __init__(self) -> None:
        self.count = 0
        self.cosines: list[NDArray[np.float64]] = []
        self.same: list[NDArray[np.bool_]] = []
        self.among: list[NDArray[np.bool_]] = []
        self.right: dict[str, list[NDArray[np.bool_]]] = {}

    def add(self, ours: NDArray, theirs: NDArray, sample: Sample, number: int) -> None:
        self.count += len(ours)
        self.cosines.append(_cosines(ours, theirs))
        first = ours.argmax(axis=1)
        self.same.append(first == theirs.argmax(axis=1))
        self.among.append(_among_five(theirs, first))
        if sample.labels is not None:
            labels = _labels(sample, len(ours), ours.shape[1], number)
            for side, scores in (("reference", ours), ("candidate", theirs)):
                self.right.setdefault(f"top-1, {side}", []).append(scores.argmax(axis=1) == labels)
                self.right.setdefault(f"top-5, {side}", []).append(_among_five(scores, labels))

    def embeddings(self) -> PlainFigures:
        cosines = np.concatenate(self.cosines)
        return PlainFigures(
            {"embedding_cosine": float(cosines.mean()), "embedding_cosine_min": float(cosines.min())}, {}
        )

    def choices(self) -> PlainFigures:
        values = {
            "top1_agreement": float(np.concatenate(self.same).mean()),
            "top5_agreement": float(np.concatenate(self.among).mean()),
        }
        facts = {name: float(np.concatenate(found).mean()) for name, found in self.right.items()}
        if facts:
            values["accuracy_drop"] = facts["top-1, reference"] - facts["top-1, candidate"]
            values["top5_accuracy_drop"] = facts["top-5, reference"] - facts["top-5, candidate"]
        return PlainFigures(values, dict.fromkeys(values, 1.0 / self.count), facts)


def _judged(subject: PlainSubject, sample: Sample, data: PlainData, number: int) -> NDArray:
    """The judged output, [rows, values], float64; of hidden states [rows, tokens, width] the masked mean; maps flat."""
    outputs = subject.infer(sample.feeds)
    name = next(iter(outputs)) if data.output is None else data.output
    if name not in outputs:
        raise KilnError(f"{subject.side.name} has no output '{name}'; it has {', '.join(outputs)}")
    values = np.asarray(outputs[name], np.float64)
    if values.ndim == 3 and data.kind == "embedding":
        mask = np.asarray(sample.feeds.get(_MASK, np.ones(values.shape[:2])), np.float64)[..., None]
        values = np.where(mask > 0, values, 0.0).sum(axis=1) / np.maximum(mask.sum(axis=1), 1.0)
    if values.ndim > 3 and data.kind == "embedding":
        values = values.reshape(len(values), -1)
    if values.ndim != 2:
        raise KilnError(
            f"output '{name}' of {subject.side.name} is {list(values.shape)}; a {data.kind} gives [rows, values]"
        )
    if not np.isfinite(values).all():
        row = int(np.argmin(np.isfinite(values).all(axis=1)))
        raise KilnError(f"output '{name}' of {subject.side.name} has NaN or infinity in row {row} of sample {number}")
    return values


def _labels(sample: Sample, rows: int, classes: int | None, number: int) -> NDArray[np.integer]:
    labels = np.asarray(sample.labels)
    if labels.shape != (rows,) or labels.dtype.kind not in "iu":
        raise KilnError(f"sample {number} has labels {labels.dtype} {list(labels.shape)}; expected integers [{rows}]")
    if classes is not None and (labels.min() < 0 or labels.max() >= classes):
        wrong = labels[(labels < 0) | (labels >= classes)][0]
        raise KilnError(f"sample {number} has the label {wrong}; the model tells classes 0 to {classes - 1} apart")
    return labels


def _among_five(scores: NDArray, wanted: NDArray[np.integer]) -> NDArray[np.bool_]:
    count = min(5, scores.shape[1])
    best = np.argpartition(scores, scores.shape[1] - count, axis=1)[:, -count:]
    return (best == wanted[:, None]).any(axis=1)


def _cosines(a: NDArray, b: NDArray) -> NDArray[np.float64]:
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    same = (a == b).all(axis=1).astype(np.float64)
    return np.where(norms > 0, (a * b).sum(axis=1) / np.where(norms > 0, norms, 1.0), same)
