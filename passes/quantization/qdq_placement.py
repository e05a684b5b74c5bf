"""Which tensors are stored in 8 bits besides what enters quantised layers, by what a target fuses.

ONNX Runtime on a CPU keeps a network in integers where nothing between its convolutions is float: every operator that
it has an integer kernel for needs Q on its result and D on its inputs. So a convolution's result, behind a Relu or Clip
that 8 bits make redundant, gets Q; so does that of an addition, a pool or a view all of whose inputs have it, if
something quantised reads it in the end. TensorRT quantises what enters a layer, and fuses a residual addition into the
convolution before it where the other summand is quantised too (TensorRT's guide, "Q/DQ layer-placement
recommendations"). Changes nothing.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from passes.pattern import axes_of, consumers, in_scope, is_op, is_output, only_consumer, producer, rank_of, scalar_of

EXACT = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "MaxPool")
"""Operators whose results have the same 8-bit values as their input."""
_JOINING = ("Add", "Mul", "Concat")
_COMPUTED = (*_JOINING, "AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid")


@dataclass(frozen=True)
class Placement:
    """`tensors` get Q and D. Of those in `whole` all readers read what D gives; of others, `readers` alone."""

    tensors: tuple[gs.Tensor, ...]
    readers: frozenset[int]
    """Identities of nodes: quantised layers and what goes on in integers."""
    whole: frozenset[int] = frozenset()
    """Identities of tensors."""
    summands: tuple[tuple[gs.Node, int], ...] = ()
    """Additions, and which of their inputs is read behind Q and D."""


def cpu_placement(graph: gs.Graph, layers: Collection[gs.Node]) -> Placement:
    """For quantised `layers` of the main graph."""
    entering = {id(node.inputs[0]): node.inputs[0] for node in layers}
    results = [settled(graph, node.outputs[0]) for node in layers if is_op(node, "Conv")]
    whole = {id(tensor): tensor for tensor in results if not is_output(graph, tensor)}
    possible = {**entering, **whole}
    chain = []
    for node in graph.nodes:
        if _stays_in_integers(graph, node, possible):
            chain.append(node)
            possible[id(node.outputs[0])] = node.outputs[0]
    wanted = {**entering, **whole}
    for node in reversed(chain):
        if id(node.outputs[0]) in wanted:
            wanted |= {id(tensor): tensor for tensor in _variables(node)}
    made = {id(node.outputs[0]): node for node in chain if id(node.outputs[0]) in wanted}
    readers = {id(node) for node in (*layers, *made.values())}
    return Placement(tuple(wanted.values()), frozenset(readers), frozenset(whole.keys() | made.keys()))


def gpu_placement(graph: gs.Graph, layers: Collection[gs.Node]) -> Placement:
    """For quantised `layers` of the main graph."""
    entering = {id(node.inputs[0]): node.inputs[0] for node in layers}
    convolutions = {id(node.outputs[0]) for node in layers if is_op(node, "Conv")}
    summands = []
    for node in graph.nodes:
        if not is_op(node, "Add") or len(_variables(node)) != 2:
            continue
        fused = [
            index
            for index, tensor in enumerate(node.inputs)
            if id(tensor) in convolutions and only_consumer(graph, tensor) is node
        ]
        if fused:
            summands.append((node, 1 - fused[-1]))
    tensors = entering | {id(node.inputs[index]): node.inputs[index] for node, index in summands}
    return Placement(tuple(tensors.values()), frozenset(id(node) for node in layers), summands=tuple(summands))


def settled(scope: gs.Graph, tensor: gs.Tensor) -> gs.Tensor:
    """What a Relu or Clip with constant bounds makes of `tensor`, if that alone reads it; else `tensor`."""
    reader = only_consumer(scope, tensor, "Relu", "Clip")
    return tensor if reader is None or not in_scope(scope, reader) or bounds_of(reader) is None else reader.outputs[0]


def bounds_of(node: gs.Node | None) -> tuple[float, float] | None:
    """The least and the greatest value that a Relu or Clip lets through; None for other nodes and bounds."""
    if is_op(node, "Relu"):
        return 0.0, np.inf
    if node is None or not is_op(node, "Clip"):
        return None
    bounds = []
    for index, name, default in ((1, "min", -np.inf), (2, "max", np.inf)):
        absent = index >= len(node.inputs) or node.inputs[index].is_empty()
        bounds.append(float(node.attrs.get(name, default)) if absent else scalar_of(node.inputs[index]))
    low, high = bounds
    return None if low is None or high is None or low > 0 or high < 0 else (low, high)


def _variables(node: gs.Node) -> list[gs.Tensor]:
    """What a node computes with, without the shape of a view or the axes of a mean."""
    return list(node.inputs if is_op(node, *_JOINING) else node.inputs[:1])


def _stays_in_integers(graph: gs.Graph, node: gs.Node, possible: dict[int, gs.Tensor]) -> bool:
    if not (is_op(node, *EXACT, *_COMPUTED) or _is_mean_of_image(node)) or len(node.outputs) != 1:
        return False
    inputs = _variables(node)
    if is_output(graph, node.outputs[0]) or not inputs:
        return False
    return all(id(tensor) in possible and producer(tensor) is not None for tensor in inputs)


def _is_mean_of_image(node: gs.Node) -> bool:
    axes = axes_of(node) if is_op(node, "ReduceMean") and rank_of(node.inputs[0]) == 4 else None
    return axes is not None and sorted(axis % 4 for axis in axes) == [2, 3] and bool(node.attrs.get("keepdims", 1))


def exact_result(graph: gs.Graph, tensor: gs.Tensor) -> gs.Tensor | None:
    """What a view that alone reads `tensor` makes of it, whose range is the same; None where there is none."""
    readers = consumers(tensor)
    same = len(readers) == 1 and is_op(readers[0], *EXACT) and not is_output(graph, tensor)
    return readers[0].outputs[0] if same else None
