"""Candidate graphs: the float graph with a plan applied, beside links to its weights, to be run and thrown away."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from passes.base import Pass
from passes.graph import graph_from_path, proto_from_graph, tidy
from passes.manager import link_or_copy
from passes.onnx_model import external_files, load_structure
from passes.quantization.plan import PrecisionPlan
from passes.shapes import infer_shapes

Rewrites = Callable[[PrecisionPlan], Sequence[Pass]]
"""The passes that apply a plan."""


@contextmanager
def candidate(reference: Path, plan: PrecisionPlan, rewrites: Rewrites) -> Iterator[Path]:
    """The file of `reference` with `plan` applied. It lies in a folder beside `reference` and is gone afterwards.

    Only weights that the plan changes are written; the others are links. The graph's metadata is kept.
    """
    proto = load_structure(reference)
    graph = graph_from_path(reference)
    for rewrite in rewrites(plan):
        infer_shapes(graph)
        rewrite.call(graph)
        tidy(graph)
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    with TemporaryDirectory(dir=reference.parent, prefix=f".{reference.name}-") as folder:
        for file in external_files(reference, proto):
            link_or_copy(file, Path(folder) / file.relative_to(reference.parent))
        path = Path(folder) / reference.name
        path.write_bytes(proto_from_graph(graph, metadata).SerializeToString())
        yield path
