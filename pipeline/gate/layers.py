"""Errors layer by layer: both graphs run on the same inputs with the outputs of their products shown, part by part.

Layers are those of `passes.quantization.layers`, matched by the name of their output, else of their node. A layer's
error has two parts: what it was given and what it added. Where the candidate shows what it fed to a layer, the second
is the difference from what the reference's layer makes of that; else it is taken to be the layer's noise-to-signal
ratio less that of what it was given, the nearest tensors before it that both graphs have. Knows nothing of limits.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from engines.backends.onnxruntime import CPU, OnnxRuntimeDecoder, ort_message, session_from_file
from engines.backends.probes import PREFIX, graph_with_probes
from engines.runtime.batch import Chunk
from engines.runtime.packing import step_inputs_from_batch
from engines.runtime.sequence import Sequence as RunningSequence
from engines.runtime.sequence import blocks_for
from passes.graph import graph_from_path
from passes.quantization.layers import Layer, layers_of
from pipeline.gate.alone import LEAN, layers_alone
from pipeline.gate.graphs import GraphFile, bound
from pipeline.gate.metrics import ErrorSums
from plugins.errors import KilnError

Tensors = Mapping[str, NDArray]
_ROUNDING = 1e-11
"""Noise-to-signal ratio below which a layer added nothing: sums of FP32 in another order."""


@dataclass(frozen=True)
class LayerRow:
    """One layer's errors over all inputs of a stratum. `added` is the noise-to-signal ratio that it added itself."""

    name: str
    kind: str
    snr_db: float
    cosine: float
    max_error: float
    peak: float
    """Largest magnitude of the reference's output."""
    added: float
    parameters: int


@dataclass(frozen=True)
class Matched:
    """A layer's output in both graphs, and the tensors before it, by name in the reference."""

    name: str
    kind: str
    parameters: int
    output: str
    inputs: tuple[str, ...]
    layer: Layer
    alone: bool
    """Whether the candidate shows the layer's own input."""


@dataclass(frozen=True)
class Matching:
    """What both graphs show: tensors of the reference by name, with the name that the candidate has for each."""

    layers: tuple[Matched, ...]
    tensors: Mapping[str, str]
    missing: tuple[str, ...]
    """Layers whose output the candidate lacks."""

    @property
    def ours(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    @property
    def theirs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.tensors.values()))


def match_layers(reference: Path, candidate: Path) -> Matching:
    """Raises KilnError for unreadable graphs, and where the two share no layer."""
    ours, theirs = graph_from_path(reference), graph_from_path(candidate)
    known = {tensor.name for node in theirs.nodes for tensor in node.outputs}
    by_node = {node.name: node.outputs[0].name for node in theirs.nodes if node.outputs}
    found: list[Matched] = []
    missing: list[str] = []
    tensors: dict[str, str] = {}
    by_name = ours.tensors()
    for layer in layers_of(ours):
        other = layer.output if layer.output in known else by_node.get(layer.name)
        if other is None:
            missing.append(layer.name)
            continue
        inputs = tuple(sorted(_shared_before(by_name[layer.activation], known)))
        tensors |= {layer.output: other, **{name: name for name in inputs}}
        alone = inputs == (layer.activation,) and by_name[layer.activation].dtype == np.float32
        found.append(Matched(layer.name, layer.kind, layer.parameters, layer.output, inputs, layer, alone))
    if not found:
        raise KilnError(
            f"{candidate} has none of the {len(missing)} layers of {reference}, such as "
            f"{', '.join(missing[:3]) or 'none at all'}; give a reference from which the candidate was made"
        )
    return Matching(tuple(found), tensors, tuple(missing))


def _shared_before(tensor: gs.Tensor, known: set[str], seen: set[int] | None = None) -> set[str]:
    """Names of the nearest computed float tensors from `tensor` backwards that the other graph has, too."""
    seen = set() if seen is None else seen
    if id(tensor) in seen or not isinstance(tensor, gs.Variable) or not tensor.inputs:
        return set()
    seen.add(id(tensor))
    if tensor.dtype is not None and np.dtype(tensor.dtype).kind in "iub":
        return set()
    if tensor.name in known:
        return {tensor.name}
    producer = tensor.inputs[0]
    beside = {other.name for other in producer.outputs if other.name in known}
    if beside:  # such as the residual sum beside a norm
        return beside
    return set().union(*(_shared_before(source, known, seen) for source in producer.inputs))


def decoder_layers(
    reference: GraphFile, candidate: GraphFile, texts: Sequence[Sequence[int]], chunk: int, threads: int | None
) -> tuple[list[LayerRow], Matching]:
    """Layers on texts that each start an empty context, `chunk` tokens a step, in both graphs at once.

    Raises KilnError for a layer with NaN or infinity, naming it and the token.
    """
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(bound(graph)) for graph in (reference, candidate))
        matching = match_layers(ours.path, theirs.path)
        longest = max(map(len, texts))
        backends = [
            stack.enter_context(_probing_decoder(graph, names, longest, threads))
            for graph, names in ((ours, matching.ours), (theirs, matching.theirs))
        ]
        sums = _Sums(matching, ours.path, threads)
        for text in texts:
            steps = zip(*(_probed(backend, text, chunk) for backend in backends), strict=True)
            for number, (a, b) in enumerate(steps):
                sums.add(a, b, f"token {number * chunk}")
        return sums.rows(), matching


def plain_layers(
    reference: GraphFile, candidate: GraphFile, feeds: Iterable[Tensors], threads: int | None
) -> tuple[list[LayerRow], Matching]:
    """Layers of a model without a KV cache; `feeds` as the reference's graph takes them."""
    matching = match_layers(reference.path, candidate.path)
    runs = [
        _probing_model(graph, names, threads)
        for graph, names in ((reference, matching.ours), (candidate, matching.theirs))
    ]
    sums = _Sums(matching, reference.path, threads)
    for number, feed in enumerate(feeds):
        sums.add(runs[0](feed), runs[1](feed), f"sample {number}")
    return sums.rows(), matching


class _Sums:
    """Errors of every tensor that both graphs show."""

    def __init__(self, matching: Matching, reference: Path, threads: int | None) -> None:
        self._matching = matching
        self._sums = {name: ErrorSums() for name in matching.tensors}
        self._own = {layer.output: ErrorSums() for layer in matching.layers if layer.alone}
        alone = [layer.layer for layer in matching.layers if layer.alone]
        self._alone = layers_alone(reference, alone, threads) if alone else None
        self._skipped: set[str] = set()

    def add(self, ours: Tensors, theirs: Tensors, where: str) -> None:
        for name, other in self._matching.tensors.items():
            a, b = ours[name], theirs[other]
            if a.shape != b.shape:  # another layout: the candidate's is not the same tensor
                self._skipped.add(name)
            else:
                self._sums[name].add(a, b)
        for layer in self._matching.layers:
            if layer.output not in self._skipped and not np.isfinite(self._sums[layer.output].noise):
                other = self._matching.tensors[layer.output]
                _refuse_not_finite(layer.name, ours[layer.output], theirs[other], where)

        if self._alone is not None:
            names = self._matching.tensors
            given = {layer.inputs[0]: theirs[names[layer.inputs[0]]] for layer in self._matching.layers if layer.alone}
            for name, expected in self._alone(given).items():
                if expected.shape == theirs[names[name]].shape:
                    self._own[name].add(expected, theirs[names[name]])

    def rows(self) -> list[LayerRow]:
        rows = []
        for layer in self._matching.layers:
            if layer.output in self._skipped:
                continue
            found = self._sums[layer.output]
            rows.append(
                LayerRow(
                    name=layer.name,
                    kind=layer.kind,
                    snr_db=found.snr_db,
                    cosine=found.cosine,
                    max_error=found.max_error,
                    peak=found.peak,
                    added=self._added(layer),
                    parameters=layer.parameters,
                )
            )
        return rows

    def _added(self, layer: Matched) -> float:
        signal, own = self._sums[layer.output].signal, self._own.get(layer.output)
        if own is not None and own.elements and signal:
            added = own.noise / signal
        else:
            given = (self._sums[name].noise_ratio for name in layer.inputs if name not in self._skipped)
            added = self._sums[layer.output].noise_ratio - max(given, default=0.0)
        return added if added > _ROUNDING else 0.0


def _refuse_not_finite(layer: str, ours: NDArray, theirs: NDArray, where: str) -> None:
    side, values = ("reference", ours) if not np.isfinite(ours).all() else ("candidate", theirs)
    rows = values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)
    first = int(np.argmin(np.isfinite(rows).all(axis=1)))
    raise KilnError(
        f"layer {layer} of the {side} gives NaN or infinity, first in row {first} after {where}; every layer before it "
        f"is finite: keep that layer in float, or calibrate again"
    )


@contextmanager
def _probing_decoder(
    graph: GraphFile, probes: Sequence[str], tokens: int, threads: int | None
) -> Iterator[OnnxRuntimeDecoder]:
    assert graph.decoder is not None
    blocks = blocks_for(tokens, graph.decoder.kv.block_size)
    backend = OnnxRuntimeDecoder(
        graph.path, graph.decoder.kv, blocks, plugins=graph.plugins, threads=threads, probes=probes, config=LEAN
    )
    try:
        yield backend
    finally:
        backend.close()


def _probed(backend: OnnxRuntimeDecoder, text: Sequence[int], chunk: int) -> Iterator[Tensors]:
    sequence = RunningSequence(0, text, max_tokens=1)
    sequence.blocks = array("i", range(blocks_for(len(text), backend.kv.block_size)))
    while sequence.pending:
        part = Chunk(sequence, sequence.computed, min(chunk, sequence.pending))
        inputs = step_inputs_from_batch((part,), backend.kv.block_size)
        yield backend.probe(replace(inputs, logits_indices=np.arange(len(inputs.input_ids), dtype=np.int32)))
        sequence.computed = part.end


def _probing_model(graph: GraphFile, probes: Sequence[str], threads: int | None) -> Callable[[Tensors], Tensors]:
    proto = graph_with_probes(graph.path, probes)
    session = session_from_file(graph.path, CPU, graph.plugins, threads, config=LEAN, graph=proto)
    outputs = [PREFIX + probe for probe in probes]

    def run(feeds: Tensors) -> Tensors:
        try:
            values = session.run(outputs, dict(feeds))
        except Exception as error:  # ONNX Runtime's errors have no common base
            raise KilnError(f"{graph.path} cannot be run on the given inputs: {ort_message(error)}") from error
        return dict(zip(probes, values, strict=True))

    return run
