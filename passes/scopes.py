"""Graphs inside graphs, and how messages name a node."""

from collections.abc import Iterator

import onnx
import onnx_graphsurgeon as gs


def scopes(graph: gs.Graph) -> Iterator[gs.Graph]:
    """The graph itself and every subgraph in it, outer before inner."""
    yield graph
    for node in graph.nodes:
        for subgraph in node.subgraphs():
            yield from scopes(subgraph)


def subgraphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Every graph inside a graph's nodes, at any depth."""
    for node in graph.node:
        for attribute in node.attribute:
            for subgraph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield subgraph
                yield from subgraphs_of(subgraph)


def label(node: gs.Node) -> str:
    """How messages name a node: its name, else its first output."""
    return node.name or next((tensor.name for tensor in node.outputs if tensor.name), node.op)
