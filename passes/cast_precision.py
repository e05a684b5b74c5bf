"""Compute a graph in FP16 or BF16, with islands of FP32 where the type's range or precision does not do.

1. FP32 node with a 16-bit form, outside the islands -> the same node on 16-bit tensors; its constants, rounded once to
   nearest even, become new 16-bit constants.
2. FP32 tensor read by 16-bit nodes -> one Cast to 16 bits, shared by all of them.
3. 16-bit tensor read by FP32 nodes -> one Cast to FP32, shared by all of them; of DequantizeLinear, a second one.
4. `keep_io`: FP32 graph output computed in 16 bits -> Cast to FP32 under the output's name; so final logits are
   computed in 16 bits, accumulated in FP32 by the kernel and rounded once. Without `keep_io` FP32 inputs and outputs of
   the main graph become 16-bit, but not key/value caches and not tensors measured beyond the limit.
5. 16-bit Attention -> `softmax_precision` is FP32 unless given.

`passes.precision_islands` says which nodes are islands. Bodies of If, Loop and Scan are rewritten like the main graph;
their inputs and outputs keep their types, so carried values stay consistent. PagedAttention is an island, as are all
operators of other domains that are not known to have a 16-bit form. Weights stay on disk until they are written.

`ranges` holds the largest magnitude of each tensor on representative inputs (`pipeline.ranges`). A node is cast only
if they stay below max / `margin`. The default 4 leaves two binary orders for inputs that were not measured and costs
little: activations that are not outliers lie orders below 16376. Without ranges only constants are checked.

Changes precision: FP16 keeps 11 significant bits, BF16 8. A second call finds the same islands and changes nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray
from onnx_graphsurgeon.ir.tensor import LazyValues

from passes.base import Effect, Outcome
from passes.pattern import STANDARD, consumers, is_op, producer
from passes.precision_islands import (
    FOLLOWERS,
    FP32,
    LOW_TYPES,
    Precision,
    Slots,
    follow_neighbours,
    keep_beside_dequantised,
    lacks_form,
    nodes_of,
    refuse_by_value,
    slots_of,
    structural_islands,
)
from passes.scopes import label, scopes
from plugins.paged_attention.schema import OP_TYPE

LowDtype = Literal["float16", "bfloat16"]

_BFLOAT16_OPSET = 13
"""The first opset whose Cast knows BF16."""


class CastPrecision:
    """Implements `passes.base.Pass` and `Measuring`.

    `ranges`: max |value| by tensor name. `measure` gives them for the graph at hand, if `ranges` is None.
    `keep`: names of nodes that stay in FP32, with wildcards * and ?.
    """

    name = "cast_precision"
    effect = Effect.PRECISION

    def __init__(
        self,
        dtype: LowDtype = "float16",
        ranges: Mapping[str, float] | None = None,
        keep: Sequence[str] = (),
        keep_io: bool = True,
        margin: float = 4.0,
        measure: Callable[[Path], Mapping[str, float]] | None = None,
    ) -> None:
        if dtype not in LOW_TYPES:
            raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(LOW_TYPES)}")
        if not margin >= 1:
            raise ValueError(f"margin is {margin}; expected at least 1")
        self._measure = measure if ranges is None else None
        self.precision = Precision(LOW_TYPES[dtype], margin, dict(ranges or {}))
        self.keep, self.keep_io = tuple(keep), keep_io

    def prepare(self, model: Path) -> None:
        if self._measure is not None:
            self.precision = replace(self.precision, ranges=dict(self._measure(model)))

    def call(self, graph: gs.Graph) -> Outcome:
        if self.precision.low == LOW_TYPES["bfloat16"] and graph.opset < _BFLOAT16_OPSET:
            return Outcome(notes=[f"bfloat16 needs opset {_BFLOAT16_OPSET}; the graph has {graph.opset}"])
        outcome = Outcome()
        inputs, outputs = self._io(graph, outcome)
        low = self._low_nodes(graph, {id(tensor) for tensor in inputs}, outcome)
        _Rewriting(graph, low, self.precision.low).run(inputs, outputs)
        outcome.rewrites = len(low) + len(inputs) + len(outputs)
        return outcome

    def _low_nodes(self, graph: gs.Graph, low_inputs: set[int], outcome: Outcome) -> dict[int, Slots]:
        """Nodes to compute in 16 bits, by identity; notes say which are kept because of values."""
        kept, unsafe, formless = structural_islands(graph), set[int](), set[str]()
        low: dict[int, Slots] = {}
        for node in nodes_of(graph):
            if id(node) in kept or any(fnmatchcase(label(node), pattern) for pattern in self.keep):
                continue
            slots = slots_of(node, graph.opset, self.precision.low)
            if slots is None:
                if lacks_form(node, graph.opset, self.precision.low):
                    formless.add(node.op)
            elif reason := refuse_by_value(node, slots, self.precision):
                outcome.notes.append(f"node {label(node)} ({node.op}): {reason}")
                unsafe.add(id(node))
            else:
                low[id(node)] = slots
        for op in sorted(formless):
            outcome.notes.append(f"{op}: opset {graph.opset} has no {self.precision.low} form of it: kept in FP32")
        keep_beside_dequantised(graph, low)
        follow_neighbours(graph, low, unsafe, low_inputs)
        return low

    def _io(self, graph: gs.Graph, outcome: Outcome) -> tuple[list[gs.Tensor], list[gs.Tensor]]:
        """FP32 inputs and outputs of the main graph that become 16-bit."""
        if self.keep_io:
            return [], []
        found: tuple[list[gs.Tensor], list[gs.Tensor]] = ([], [])
        for tensors, chosen in zip((graph.inputs, graph.outputs), found, strict=True):
            for tensor in tensors:
                attends = any(node.op == OP_TYPE for node in (*tensor.inputs, *tensor.outputs))
                if tensor.dtype != FP32 or attends:
                    continue
                if excess := self.precision.excess(tensor.name):
                    outcome.notes.append(f"max |'{tensor.name}'| {excess}: stays FP32")
                else:
                    chosen.append(tensor)
        return found


class _Rewriting:
    """Both forms of every tensor, made when first asked for."""

    def __init__(self, graph: gs.Graph, low: dict[int, Slots], dtype: np.dtype) -> None:
        self.graph, self.low, self.dtype = graph, low, dtype
        self.low_form: dict[int, gs.Tensor] = {}
        self.high_form: dict[int, gs.Tensor] = {}
        self.home: dict[int, gs.Graph] = {}
        self.inputs: dict[int, list[gs.Tensor]] = {}
        for scope in scopes(graph):
            for tensor in (*scope.inputs, *(made for node in scope.nodes for made in node.outputs)):
                self.home[id(tensor)] = scope

    def run(self, low_inputs: list[gs.Tensor], low_outputs: list[gs.Tensor]) -> None:
        nodes = nodes_of(self.graph)
        kept_outputs = {id(tensor) for scope in scopes(self.graph) for tensor in scope.outputs}
        kept_outputs -= {id(tensor) for tensor in low_outputs}
        self.inputs = {id(node): list(node.inputs) for node in nodes}
        for tensor in low_inputs:
            self._make_low(tensor)
        for node in nodes:
            for index in self.low[id(node)].outputs if id(node) in self.low else ():
                self._produce_low(node, index, id(node.outputs[index]) in kept_outputs)
        for node in nodes:
            for index, tensor in enumerate(self.inputs[id(node)]):
                wanted = self._form_for(node, index, tensor)
                if wanted is not node.inputs[index]:
                    node.inputs[index] = wanted
        for tensor in low_outputs:
            if tensor.dtype == FP32:
                self._output_low(tensor)
        for scope in scopes(self.graph):
            for index, tensor in enumerate(scope.outputs):
                if id(tensor) in kept_outputs and id(tensor) in self.low_form and tensor.dtype == self.dtype:
                    scope.outputs[index] = self._as_high(tensor)  # a body that hands a 16-bit graph input on
        for node in nodes:
            if id(node) in self.low and is_op(node, "Attention"):
                node.attrs.setdefault("softmax_precision", int(onnx.TensorProto.FLOAT))

    def _form_for(self, node: gs.Node, index: int, tensor: gs.Tensor) -> gs.Tensor:
        if id(node) in self.low and index in self.low[id(node)].inputs:
            return self._as_low(tensor)
        return tensor if is_op(node, *FOLLOWERS) else self._as_high(tensor)

    def _make_low(self, tensor: gs.Tensor) -> None:
        tensor.dtype = self.dtype
        self.low_form[id(tensor)] = tensor

    def _produce_low(self, node: gs.Node, index: int, is_output: bool) -> None:
        """An output of the node becomes 16-bit; where it is a graph's output it stays, behind a Cast."""
        tensor = node.outputs[index]
        if not is_output:
            self._make_low(tensor)
            return
        made = gs.Variable(f"{tensor.name}/{self.dtype}", self.dtype, tensor.shape)
        node.outputs[index] = made
        self.low_form[id(tensor)], self.high_form[id(tensor)] = made, tensor
        self._cast(self.home[id(tensor)], made, tensor)

    def _as_low(self, tensor: gs.Tensor) -> gs.Tensor:
        if id(tensor) not in self.low_form:
            name = f"{tensor.name}/{self.dtype}"
            if isinstance(tensor, gs.Constant):
                self.low_form[id(tensor)] = gs.Constant(name, _rounded(tensor._values, self.dtype))
            else:
                made = gs.Variable(name, self.dtype, tensor.shape)
                self._cast(self.home[id(tensor)], tensor, made)
                self.low_form[id(tensor)] = made
        return self.low_form[id(tensor)]

    def _as_high(self, tensor: gs.Tensor) -> gs.Tensor:
        if isinstance(tensor, gs.Constant) or id(tensor) not in self.low_form or tensor.dtype == FP32:
            return tensor
        if id(tensor) not in self.high_form:
            made = gs.Variable(f"{tensor.name}/float32", FP32, tensor.shape)
            self.high_form[id(tensor)] = made
            scope, node = self.home[id(tensor)], producer(tensor, "DequantizeLinear")
            if node is None:
                self._cast(scope, tensor, made)
            else:  # once more: a Cast behind it would keep backends from multiplying in 8 bits
                inputs = self.inputs[id(node)]
                scope.nodes.append(gs.Node(node.op, made.name, dict(node.attrs), inputs, [made], domain=STANDARD))
        return self.high_form[id(tensor)]

    def _output_low(self, tensor: gs.Tensor) -> None:
        """An output of the main graph that an FP32 node produces becomes 16-bit behind a Cast."""
        high = gs.Variable(f"{tensor.name}/float32", FP32, tensor.shape)
        for node in consumers(tensor):
            for index, operand in enumerate(node.inputs):
                if operand is tensor:
                    node.inputs[index] = high
        for node in list(tensor.inputs):
            node.outputs[next(i for i, made in enumerate(node.outputs) if made is tensor)] = high
        tensor.dtype = self.dtype
        self._cast(self.graph, high, tensor)

    def _cast(self, scope: gs.Graph, source: gs.Tensor, target: gs.Tensor) -> None:
        to = int(onnx.helper.np_dtype_to_tensor_dtype(target.dtype))
        name = f"{source.name}/to_{target.dtype}"
        scope.nodes.append(gs.Node("Cast", name, {"to": to}, [source], [target], domain=STANDARD))


class _Rounded(LazyValues):
    """Values of another constant in a 16-bit type, made each time they are asked for."""

    def __init__(self, source: LazyValues, dtype: np.dtype) -> None:
        self.source, self.dtype, self.shape = source, dtype, source.shape
        self.nbytes = source.nbytes * dtype.itemsize // FP32.itemsize

    @property
    def tensor(self) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(self.load())

    def load(self) -> NDArray:
        return _round(self.source.load(), self.dtype)


def _rounded(values: Any, dtype: np.dtype) -> Any:
    return _Rounded(values, dtype) if isinstance(values, LazyValues) else _round(values, dtype)


def _round(values: NDArray, dtype: np.dtype) -> NDArray:
    with np.errstate(under="ignore"):
        return values.astype(dtype)
