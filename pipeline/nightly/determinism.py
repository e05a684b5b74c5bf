"""Determinism in two parts: does the rebuilt engine compute what `stable` does, and if not, is that a rebuild's chance?

First the outputs on the same inputs, bit by bit: those that stable gave where and when it was built, so that a changed
library shows, too; where none were kept, those that it gives here. Where they differ the candidate is built again from
the same inputs a few times, and each of these is also run with its sums in another order (one thread, the library's own
rewrites off): what they differ by among themselves is the null distribution, differences that nobody caused. The
statistic is the largest |a - b| / max|b| of an output; a candidate is beyond chance where its distance from `stable` is
more than `margin` times the largest of the null distribution.

Builders that choose kernels by timing them (TensorRT) differ from build to build; ONNX Runtime's do not, so that there
the order of sums is all that the null distribution has.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.compare.comparison import subject_from
from pipeline.compare.inputs import samples_from_inputs
from pipeline.compare.subjects import DecoderSubject, PlainSubject, Subject
from pipeline.gate.graphs import graph_file_of, variant
from pipeline.nightly.config import DeterminismOptions
from pipeline.nightly.fingerprint import digest_of
from pipeline.progress import Progress
from plugins.errors import KilnError

Outputs = list[dict[str, NDArray]]
_CHUNK = 64
_ROWS = 8
"""Last positions of a text that are kept: they depend on all before them, and a vocabulary is large."""
_MADE_BY = "made by"
"""Key of the digest of the inputs; no output is called so, for they are numbered."""


def judge_determinism(
    stable: Path,
    candidate: Path,
    recorded: Path,
    rebuild: Callable[[int], Path],
    options: DeterminismOptions,
    threads: int | None,
    progress: Progress,
) -> dict[str, Any]:
    """The verdict. `rebuild` makes the candidate anew. Raises KilnError as opening engines does."""
    with progress.stage("outputs of both"):
        ours, reordered = _outputs(candidate, options, threads)
        kept = _read_outputs(recorded, options)
        theirs = kept if kept is not None else _outputs(stable, options, threads)[0]
    where = "as it runs here, for none were kept" if kept is None else "as they were when it was built"
    found = distances(ours, theirs)
    if same(ours, theirs):
        return {"passed": True, "text": f"the outputs are stable's, {where}, bit by bit", "figures": {"largest": 0.0}}
    null = [max(distances(reordered, ours))]
    for number in range(options.rebuilds):
        with progress.stage(f"rebuild {number + 1}"):
            path = rebuild(number + 1)
        outputs, variation = _outputs(path, options, threads)
        null += [max(distances(outputs, ours)), max(distances(variation, ours))]
    return verdict(max(found), null, options.margin, where)


def record_outputs(path: Path, options: DeterminismOptions, threads: int | None, target: Path) -> None:
    """Keep what a bundle computes, for those that will be compared with it."""
    with closing(subject_from(path, threads)) as subject:
        outputs = _run(subject, options)
    arrays = {f"{index}/{name}": value for index, sample in enumerate(outputs) for name, value in sample.items()}
    with target.open("wb") as stream:
        np.savez(stream, allow_pickle=False, **{_MADE_BY: np.array(_inputs_digest(options)), **arrays})


def _read_outputs(path: Path, options: DeterminismOptions) -> Outputs | None:
    """None where there are none, or they are those of other inputs."""
    if not path.is_file():
        return None
    with np.load(path, allow_pickle=False) as arrays:
        if str(arrays[_MADE_BY]) != _inputs_digest(options):
            return None
        outputs: Outputs = [{} for _ in range(options.samples)]
        for key in arrays.files:
            if key != _MADE_BY:
                index, _, name = key.partition("/")
                outputs[int(index)][name] = arrays[key]
    return outputs


def _inputs_digest(options: DeterminismOptions) -> str:
    """Of what decides the inputs."""
    return digest_of([options.samples, options.tokens, options.seed, _ROWS])


def verdict(found: float, null: Sequence[float], margin: float, where: str = "") -> dict[str, Any]:
    """A candidate's distance held against the null distribution."""
    limit = margin * max(null)
    passed = bool(found <= limit)
    text = (
        f"{'within' if passed else 'beyond'} chance: the outputs differ from stable's, {where}, by {found:.3g}; "
        f"{len(null)} rebuilds and other orders of sums from each other by up to {max(null):.3g} (limit {limit:.3g})"
    )
    figures = {"largest": found, "null, largest": max(null), "null, median": statistics.median(null), "limit": limit}
    return {"passed": passed, "text": text, "figures": figures}


def same(a: Outputs, b: Outputs) -> bool:
    """Bit by bit; a NaN equals itself."""
    pairs = zip(a, b, strict=True)
    return all(x.keys() == y.keys() and all(x[n].tobytes() == y[n].tobytes() for n in x) for x, y in pairs)


def distances(a: Outputs, b: Outputs) -> list[float]:
    """Largest |a - b| / max|b| of every sample. Raises KilnError for outputs of other names or shapes."""
    return [max(_distance(name, x, y) for name in y) for x, y in zip(a, b, strict=True)]


def _distance(name: str, a: Mapping[str, NDArray], b: Mapping[str, NDArray]) -> float:
    if name not in a or a[name].shape != b[name].shape:
        raise KilnError(
            f"output '{name}' is not what stable's is: another shape, or missing; promote such a model by hand"
        )
    x, y = a[name].astype(np.float64), b[name].astype(np.float64)
    both = np.isfinite(x) & np.isfinite(y)
    if not np.array_equal(x[~both], y[~both], equal_nan=True):
        return float("inf")
    if not both.any():
        return 0.0
    return float(np.abs(x[both] - y[both]).max() / max(np.abs(y[both]).max(), np.finfo(np.float32).tiny))


def _outputs(path: Path, options: DeterminismOptions, threads: int | None) -> tuple[Outputs, Outputs]:
    """As the engine serves, and with its sums in another order."""
    with closing(subject_from(path, threads)) as subject:
        graph = graph_file_of(subject)
        assert graph is not None, "a bundle has a graph"
        with variant(graph, subject, "other sums", optimized=False, threads=1) as reordered:
            return _run(subject, options), _run(reordered, options)


def _run(subject: Subject, options: DeterminismOptions) -> Outputs:
    if isinstance(subject, PlainSubject):
        return [subject.infer(feeds) for feeds in samples_from_inputs(subject.inputs, options.samples, options.seed)]
    assert isinstance(subject, DecoderSubject)
    generator = np.random.default_rng(options.seed)
    tokens = min(options.tokens, subject.max_context)
    texts = [generator.integers(0, subject.vocab_size, tokens).tolist() for _ in range(options.samples)]
    return [{"logits": np.concatenate(list(subject.logits(text, _CHUNK)))[-_ROWS:]} for text in texts]
