"""Bind the exported attention operator to a backend's own.

1. `com.microsoft::PagedAttention(...)` -> `kiln::PagedAttention(...)`, inputs and attributes unchanged.

Exact: only the node's domain changes. ONNX Runtime's CPU provider has no kernel for the former.
"""

import onnx_graphsurgeon as gs

from passes.base import Effect, Outcome
from passes.scopes import scopes
from plugins.paged_attention.schema import DOMAIN, EXPORT_DOMAIN, OP_TYPE


class BindAttention:
    """Implements `passes.base.Pass`."""

    name = "bind_attention"
    effect = Effect.EXACT

    def __init__(self, domain: str = DOMAIN) -> None:
        self.domain = domain

    def call(self, graph: gs.Graph) -> Outcome:
        outcome = Outcome()
        for scope in scopes(graph):
            for node in scope.nodes:
                if node.op == OP_TYPE and node.domain == EXPORT_DOMAIN and self.domain != EXPORT_DOMAIN:
                    node.domain = self.domain
                    outcome.rewrites += 1
        return outcome
