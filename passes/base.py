"""What a graph pass is: a name, options in its constructor, and one `call` that says whether it changed anything."""

from typing import Protocol

import onnx_graphsurgeon as gs


class Pass(Protocol):
    """A rewrite of one graph in place, subgraphs included."""

    name: str

    def call(self, graph: gs.Graph) -> bool:
        """Rewrite `graph`; True when it changed."""
        ...
