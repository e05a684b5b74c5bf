"""Candidate graphs: the float graph with a plan applied, beside links to its weights, to be run and thrown away."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx_graphsurgeon as gs

from passes.base import Effect, Pass
from passes.graph import graph_from_path, proto_from_graph, tidy
from passes.manager import link_weights
from passes.onnx_model import load_structure
from passes.quantization.plan import PrecisionPlan
from passes.shapes import infer_shapes

Rewrites = Callable[[PrecisionPlan], Sequence[Pass]]
"""The passes that apply a plan."""


def apply(graph: gs.Graph, passes: Sequence[Pass]) -> None:
    """Rewrite a graph in place, each pass on what the one before has left."""
    for graph_pass in passes:
        infer_shapes(graph)
        graph_pass.call(graph)
        tidy(graph)


def rescaling(passes: Sequence[Pass]) -> list[Pass]:
    """Those that move scales between activations and weights, as SmoothQuant does, and round nothing: a float graph
    after them has tensors that can be compared with those of the quantised one."""
    return [graph_pass for graph_pass in passes if graph_pass.effect is Effect.REORDERS]


@contextmanager
def candidate(reference: Path, plan: PrecisionPlan, rewrites: Rewrites) -> Iterator[Path]:
    """The file of `reference` with `plan` applied. It lies in a folder beside `reference` and is gone afterwards.

    Only weights that the plan changes are written; the others are links. The graph's metadata is kept.
    """
    proto = load_structure(reference)
    graph = graph_from_path(reference)
    apply(graph, rewrites(plan))
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    with TemporaryDirectory(dir=reference.parent, prefix=f".{reference.name}-") as folder:
        link_weights(reference, Path(folder))
        path = Path(folder) / reference.name
        path.write_bytes(proto_from_graph(graph, metadata).SerializeToString())
        yield path
