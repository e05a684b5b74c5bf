"""Structured pruning: make a graph smaller by removing whole channels, attention heads and residual branches.

1. `ffn`, `conv`: a channel -> its column of the weights that make it and its row of those that read it are cut, with
   biases, batch norms, depthwise filters and Split sizes between them.
2. `heads`: a head -> its columns of query, key and value and its rows of the output projection are cut, with the
   numbers of heads in attributes and Reshape constants. Shared key/value heads go with all their query heads.
3. `layers`: Add(x, f(x)) -> x.

`find_groups` (`passes.prune_groups`) lists what can be removed. Which units go is said by a keep list, unit indices by
group name, or by a share of each group's units of a kind: those with the smallest summed L2 norms of their slices of
weights. Everything that reads or makes a removed unit is cut with it, so the result equals the original with those
units masked to zero where they are read. What cannot be followed to its end is left alone, with a note: units that
reach a graph's input or output, a normalisation over them, or PagedAttention, whose KV heads are part of the cache's
layout and of the decoder's description outside the graph.

Changes the model: its accuracy has to be judged, and usually restored by training. A second call changes nothing: a
keep list is done with where a group has as many units as it keeps, and an instance remembers the groups that it
pruned by share, since a share is of the size found.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from passes.base import Effect, Outcome, Refusal
from passes.graph import tidy
from passes.prune_groups import Group, find_groups


class PruneStructure:
    """Implements `passes.base.Pass`; an instance is for one graph.

    `keep`: indices of the units that stay, by group name; such groups follow no share. `ffn`, `conv`, `heads`,
    `layers`: the share of units to remove from each group of the kind, rounded down. `multiple`: channels that stay are
    a multiple of it, as a machine's matrix units like them.
    """

    name = "prune_structure"
    effect = Effect.MODEL

    def __init__(
        self,
        keep: Mapping[str, Sequence[int]] | None = None,
        *,
        ffn: float = 0.0,
        conv: float = 0.0,
        heads: float = 0.0,
        layers: float = 0.0,
        multiple: int = 1,
    ) -> None:
        self.shares = {"ffn": ffn, "conv": conv, "heads": heads, "layers": layers}
        for kind, share in self.shares.items():
            if not 0 <= share < 1:
                raise ValueError(f"{kind} is {share}; expected a share from 0 to below 1")
        if multiple < 1:
            raise ValueError(f"multiple is {multiple}; expected at least 1")
        self.keep = {name: sorted(set(indices)) for name, indices in (keep or {}).items()}
        for name, indices in self.keep.items():
            if not indices or indices[0] < 0:
                raise ValueError(f"keep has {indices} for '{name}'; expected indices of units, at least one")
        self.multiple = multiple
        self._pruned: set[str] = set()

    def call(self, graph: gs.Graph) -> Outcome:
        outcome = Outcome()
        layers, reasons = find_groups(graph)
        self._prune([group for group in layers if group.kind == "layers"], outcome)
        if outcome.changed:  # channels of removed branches are not worth looking at
            tidy(graph)
        found, reasons = find_groups(graph)
        self._prune([group for group in found if group.kind != "layers"], outcome)
        names = {group.name for group in (*layers, *found)}
        for name in self.keep.keys() - names:
            reason = reasons.get(name.partition(":")[2], f"there is none of this name; there are {', '.join(names)}")
            outcome.notes.append(f"group '{name}' cannot be pruned: {reason}")
        if any(self.shares.values()):
            by_reason = {reason: node for node, reason in reversed(reasons.items())}
            outcome.notes += [f"units of node {node} stay: {reason}" for reason, node in by_reason.items()]
        return outcome

    def _prune(self, groups: list[Group], outcome: Outcome) -> None:
        chosen = []  # before any group is cut: two groups may cut one weight, on different axes
        for group in groups:
            try:
                kept = self._kept(group)
            except Refusal as refusal:
                outcome.notes.append(f"group '{group.name}' cannot be pruned: {refusal}")
                continue
            if len(kept) < group.units:
                chosen.append((group, kept))
        for group, kept in chosen:
            group.keep(kept)
            self._pruned.add(group.name)
            outcome.notes.append(f"group '{group.name}': {len(kept)} of {group.units} units kept")
            outcome.rewrites += 1

    def _kept(self, group: Group) -> list[int]:
        """Indices of the units that stay, sorted."""
        everything = list(range(group.units))
        if group.name in self.keep:
            kept = self.keep[group.name]
            if len(kept) == group.units:
                return everything
            if kept[-1] >= group.units:
                raise Refusal(f"unit {kept[-1]} is to be kept, but it has {group.units} units")
            return kept
        remaining = group.units - math.floor(self.shares[group.kind] * group.units)
        if group.kind in ("ffn", "conv"):
            remaining = min(group.units, math.ceil(remaining / self.multiple) * self.multiple)
        if group.name in self._pruned or remaining == group.units:
            return everything
        order = np.argsort(-group.norms(), kind="stable")
        return sorted(int(index) for index in order[:remaining])
