"""The pass manager: runs passes in order over a model on disk, keeps what holds, rolls back what does not, reports all.

Between two passes the model is a file in a workspace beside the target: so a rewrite can be judged by running it, a
rollback is reading the previous file again, and weights never pile up in memory. How a model is run is not known
here: a `Gate` says how far two files are apart, a `Clock` how long they take.
"""

import collections
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Protocol

import onnx_graphsurgeon as gs

from passes.base import Effect, Measuring, Outcome, Pass
from passes.graph import graph_from_path, proto_from_graph
from passes.onnx_model import OnnxModel, external_files, load_structure, onnx_model_from_path
from passes.scopes import scopes
from passes.shapes import infer_shapes
from passes.validate import check_graph
from passes.weights import consolidate, data_files, inline, spill
from plugins.errors import KilnError, first_line

LIMITS: Mapping[Effect, float | None] = {
    Effect.EXACT: 1e-6,  # a backend may choose another kernel for another shape
    Effect.REORDERS: 1e-4,
    Effect.PRECISION: 5e-2,
    Effect.QUANTISES: None,
    Effect.MODEL: None,
}
"""Largest max|after - before| / max|before| of any output that a pass may cause, by its effect; None: reported only."""


_ROUNDING = {"float16": 1e-2, "bfloat16": 5e-2}
"""What a few roundings of a type, in another order, may add up to: about ten of its last bits (a convention)."""
_MOST_NOISE = 10.0
"""How many times its limit a pass that reorders sums may err at most, however sensitive the model is."""
NEAR_ZERO = 1e-2
"""An output whose values are all small may err by this share of its limit in absolute terms: probabilities of noise."""
_PHRASES = {Effect.EXACT: "is exact", Effect.REORDERS: "reorders sums", Effect.PRECISION: "changes precision"}
_PUBLISHED = ".kiln-published"
"""Folder of a workspace for what goes to the target: the source's weights may have the same name."""
_ONE_FILE = 2**30
"""Weights of a model that came in one file stay in it up to so many bytes."""
_STILL_IN_USE = 0.99
"""Share of a weights file that must still be in use for it to be kept as it is."""


@dataclass(frozen=True)
class Errors:
    """How far outputs are apart: the worst over all outputs and inputs. NaN where only one side is not finite."""

    absolute: float
    relative: float
    """max|difference| / max|reference| of one output."""
    cosine: float
    """Smallest cosine similarity of an output's values."""
    output: str
    """The output with the largest relative error."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one run before and after a pass, from runs that took turns.

    `noise`: how far the ratio of the two may be off, as a part of it.
    """

    before: float
    after: float
    noise: float

    @property
    def pays(self) -> bool | None:
        """None where the difference is within the noise."""
        change = self.after / self.before - 1
        return None if abs(change) <= self.noise else change < 0


class CannotJudge(Exception):  # noqa: N818 (no fault of anybody's)
    """The gate has no means to run a model that the target may well run: a pass stays, and the report says so."""


class Gate(Protocol):
    def __call__(self, before: Path, after: Path) -> Errors:
        """Run both models on representative inputs. Any exception but CannotJudge means that `after` does not run."""
        ...


class Clock(Protocol):
    def __call__(self, before: Path, after: Path) -> Timing: ...


@dataclass(frozen=True)
class PassReport:
    """What one pass did. `nodes_*` count operators over all scopes; `errors` and `timing` are None if not asked for."""

    name: str
    effect: Effect
    rewrites: int
    seconds: float
    nodes_before: Mapping[str, int]
    nodes_after: Mapping[str, int]
    notes: tuple[str, ...] = ()
    errors: Errors | None = None
    limit: float | None = None
    timing: Timing | None = None
    rolled_back: str | None = None
    """Why the graph was put back as it was before; None where the result was kept."""

    @property
    def changed(self) -> bool:
        return self.rewrites > 0 and self.rolled_back is None


def run_passes(
    model: OnnxModel,
    target: Path,
    passes: Sequence[Pass],
    *,
    gate: Gate | None = None,
    noise: Callable[[Path], float] | None = None,
    clock: Clock | None = None,
    observe: Callable[[PassReport], None] = lambda report: None,
) -> tuple[OnnxModel, tuple[PassReport, ...]]:
    """Write the rewritten model to `target`, its weights beside it as `target`.data. `target` may not be `model.path`.

    `noise` tells the relative error that a backend's own rewrites of a model cause: where a pass that reorders sums is
    beyond its limit, that much is allowed, because the model is so sensitive.
    Nothing is left at `target` when this raises. Raises KilnError for a model that is not sound.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        workspace = _Workspace(model, Path(folder), _Judge(gate, noise, clock))
        reports = []
        for graph_pass in passes:
            report = workspace.run(graph_pass)
            observe(report)
            reports.append(report)
        workspace.publish(target)
    return onnx_model_from_path(target), tuple(reports)


class _Workspace:
    """The model as it stands: a graph in memory, and the same in `current`, a file that can be run."""

    def __init__(self, model: OnnxModel, folder: Path, judge: "_Judge") -> None:
        proto = load_structure(model.path)
        self.folder, self.judge = folder, judge
        self.files = external_files(model.path, proto)
        self.source_folder = model.path.parent
        self.steps = 0
        self.graph = graph_from_path(model.path)
        try:
            self.metadata = {entry.key: entry.value for entry in proto.metadata_props}
            check_graph(self.graph)
            self.nodes = count_nodes(self.graph)
        except KilnError as error:
            raise KilnError(f"{model.path}: {error}") from error
        except Exception as error:  # damage that only shows when the graph is written, such as text that is no UTF-8
            raise KilnError(
                f"{model.path} is damaged ({type(error).__name__}: {first_line(error)}); export it again"
            ) from error
        for file in self.files:
            link_or_copy(file, folder / file.relative_to(self.source_folder))
        self._spill()
        self.current = self._write()
        self.graph = graph_from_path(self.current)  # from now on all weights lie in the workspace

    def run(self, graph_pass: Pass) -> PassReport:
        start, before = perf_counter(), self.nodes
        outcome, problem = Outcome(), None
        infer_shapes(self.graph)
        try:
            if isinstance(graph_pass, Measuring):
                graph_pass.prepare(self.current)
            outcome = graph_pass.call(self.graph)
            if outcome.changed:
                self._spill()
                check_graph(self.graph)
        except Exception as error:  # a bug in one pass must not cost the build: without it the model still runs
            problem = f"{type(error).__name__}: {first_line(error)}"
        seconds = perf_counter() - start
        errors = limit = timing = None
        if outcome.changed and problem is None:
            candidate = self._write(outcome.metadata)
            try:
                errors, limit, problem = self.judge.judge(graph_pass.effect, self.graph, self.current, candidate)
            except CannotJudge as reason:
                limit = limit_for(graph_pass.effect, self.graph)
                outcome.notes.append(f"not judged: {reason}")
            if problem is None:
                timing = self.judge.time(self.current, candidate)
        if problem is not None:
            self.graph = graph_from_path(self.current)
        elif outcome.changed:
            self.current, self.nodes = candidate, count_nodes(self.graph)
            self.metadata |= outcome.metadata
        return PassReport(
            name=graph_pass.name,
            effect=graph_pass.effect,
            rewrites=outcome.rewrites,
            seconds=seconds,
            nodes_before=before,
            nodes_after=self.nodes,
            notes=tuple(outcome.notes),
            errors=errors,
            limit=limit,
            timing=timing,
            rolled_back=problem,
        )

    def publish(self, target: Path) -> None:
        """Weights first, the graph last; an older graph goes before its weights do, so that no mixture can be read."""
        data, folder = target.with_name(f"{target.name}.data"), self.folder
        used = data_files(self.graph)
        ours = [self.folder / file.relative_to(self.source_folder) for file in self.files]
        if not self.files and sum(used.values()) < _ONE_FILE:
            inline(self.graph)
        elif set(used) != set(ours) or any(used[file] < _STILL_IN_USE * file.stat().st_size for file in ours):
            folder = self.folder / _PUBLISHED
            folder.mkdir()
            consolidate(self.graph, folder / data.name)
            ours = list(data_files(self.graph))  # none where every constant is small
        structure = self.folder / f"{target.name}.new"
        structure.write_bytes(proto_from_graph(self.graph, self.metadata).SerializeToString())
        target.unlink(missing_ok=True)
        for file in ours:
            place = target.parent / file.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            _move(file, place)
        os.replace(structure, target)

    def _spill(self) -> None:
        """Put new weights into a file of their own: they may be too large for one message."""
        self.steps += 1
        spill(self.graph, self.folder / f"kiln-step{self.steps}.data")

    def _write(self, metadata: Mapping[str, str] = MappingProxyType({})) -> Path:
        """The graph, its weights spilled, as a file of the workspace."""
        path = self.folder / f"kiln-step{self.steps}.onnx"
        path.write_bytes(proto_from_graph(self.graph, {**self.metadata, **metadata}).SerializeToString())
        return path


def limit_for(effect: Effect, graph: gs.Graph) -> float | None:
    """The limit of a pass on a graph: LIMITS, but never below what rounding to the graph's own types costs."""
    limit = LIMITS[effect]
    if limit is None:
        return None
    types = {str(t.dtype) for scope in scopes(graph) for node in scope.nodes for t in node.outputs if t.dtype}
    return max([limit, *(floor for name, floor in _ROUNDING.items() if name in types)])


@dataclass(frozen=True)
class _Judge:
    """What is asked of a rewritten model; what was not given is not asked."""

    gate: Gate | None
    noise: Callable[[Path], float] | None
    clock: Clock | None

    def judge(
        self, effect: Effect, graph: gs.Graph, before: Path, after: Path
    ) -> tuple[Errors | None, float | None, str | None]:
        """The errors, their limit, and why the pass must be undone, None where it may stay. Raises CannotJudge."""
        if self.gate is None:
            return None, None, None
        limit = limit_for(effect, graph)
        try:
            errors = self.gate(before, after)
        except CannotJudge:
            raise
        except Exception as error:  # backends' errors have no common base
            return None, limit, f"the rewritten model does not run: {first_line(error)}"
        if limit is None or _within(errors, limit):
            return errors, limit, None
        if effect is Effect.REORDERS and self.noise is not None:
            limit = max(limit, min(self.noise(before), _MOST_NOISE * limit))
            if _within(errors, limit):
                return errors, limit, None
        found = f"relative error {errors.relative:.2g} at output '{errors.output}' is above {limit:.1g}"
        return errors, limit, f"{found}, the limit for a pass that {_PHRASES[effect]}"

    def time(self, before: Path, after: Path) -> Timing | None:
        return None if self.clock is None else self.clock(before, after)


def _within(errors: Errors, limit: float) -> bool:
    return errors.relative <= limit or errors.absolute <= NEAR_ZERO * limit


def count_nodes(graph: gs.Graph) -> dict[str, int]:
    """Nodes by operator, all scopes together; other domains' operators as `domain::Op`."""
    found = collections.Counter(
        f"{node.domain}::{node.op}" if node.domain else node.op for scope in scopes(graph) for node in scope.nodes
    )
    return dict(sorted(found.items()))


def _move(file: Path, place: Path) -> None:
    """Move, or copy a file that has another name as well: onnx refuses weights with several hard links."""
    if place.exists() and place.samefile(file):
        return
    if file.stat().st_nlink > 1:
        own = file.with_name(f"{file.name}.own")
        shutil.copyfile(file, own)
        file = own
    os.replace(file, place)


def link_weights(model: Path, folder: Path) -> None:
    """Put a model's external data into `folder` as it lies beside the model."""
    for file in external_files(model, load_structure(model)):
        link_or_copy(file, folder / file.relative_to(model.parent))


def link_or_copy(source: Path, target: Path) -> None:
    """The same content under another name; a copy where the file system has no links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
