"""The smallest set of edges that separates two vertices of a directed graph, found by shortest augmenting paths.

Source: Edmonds and Karp, "Theoretical improvements in algorithmic efficiency for network flow problems", 1972.
"""

from collections import deque
from collections.abc import Hashable, Iterable

UNCUT = 1 << 40
"""The capacity of an edge that must not be cut."""


def minimum_cut(
    edges: Iterable[tuple[Hashable, Hashable, int]], source: Hashable, sink: Hashable
) -> tuple[int, set[Hashable]]:
    """The capacity of a minimum cut, and the vertices on the source's side: as few as any minimum cut has there.

    `edges` holds (from, to, capacity); capacities of parallel edges add up.
    """
    left: dict[Hashable, dict[Hashable, int]] = {source: {}, sink: {}}
    for start, end, capacity in edges:
        forward, backward = left.setdefault(start, {}), left.setdefault(end, {})
        forward[end] = forward.get(end, 0) + capacity
        backward.setdefault(start, 0)
    total = 0
    while sink in (came_from := _reached(left, source)):
        path, vertex = [], sink
        while vertex is not source:
            path.append((came_from[vertex], vertex))
            vertex = came_from[vertex]
        flow = min(left[start][end] for start, end in path)
        for start, end in path:
            left[start][end] -= flow
            left[end][start] += flow
        total += flow
    return total, set(came_from)


def _reached(left: dict[Hashable, dict[Hashable, int]], source: Hashable) -> dict[Hashable, Hashable]:
    """Every vertex that still has a path from the source, with the vertex before it."""
    came_from: dict[Hashable, Hashable] = {source: source}
    queue = deque([source])
    while queue:
        start = queue.popleft()
        for end, capacity in left[start].items():
            if capacity > 0 and end not in came_from:
                came_from[end] = start
                queue.append(end)
    return came_from
