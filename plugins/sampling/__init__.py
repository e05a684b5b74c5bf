"""Operators that choose tokens inside the graph, and feed them to the next step."""
