"""Merge parallel linear branches of one input into one convolution (structural re-parameterisation).

RepVGG (Ding et al. 2021), ACNet (2019), Diverse Branch Block (2021) and MobileOne (Vasu et al. 2023) train several
branches whose outputs are added; in inference their sum is one convolution, since convolution is linear in its kernel:

1. a tree of Add and Sum over `Conv(x, W0, b0)` and other branches of the same x -> `Conv(x, W0 + sum Wi, b0 + sum bi)`

The convolution with the most taps is the host. What is merged into it, with `W` laid on the host's taps:

2. `Conv(x, W, b)` of the same group and strides, whose taps all fall on taps of the host (1x1, 1xk, kx1 in kxk; also
   dilated ones), and whose padding gives the same output size;
3. x itself, where strides are 1 and the host keeps the number of channels: `W[m, m mod C/g] = 1` at the centre tap;
4. `AveragePool(x)` whose padding counts, under the conditions of 2 and 3: `W[m, m mod C/g] = 1 / taps` at each tap;
5. a constant of one value a channel: `W = 0`.
6. 2, 3 and 4 followed by affine operators (`passes.affine`): a BatchNormalization on x needs no Conv to fold into.

Branches that stay are added to the result as before. Merged branches must have no other reader.

Reorders: kernels are added in float64 and rounded once to the host's type, activations are no longer added.

Left alone: branches with activations in between, a 1xk and a kx1 without a kxk that holds both (the union would
multiply more), pools larger than every convolution, weights that are computed, and sequences of convolutions.
"""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.affine import (
    MINIMUM_OPSET,
    Affine,
    Channels,
    is_float_constant,
    link_before,
    numpy_dtype,
    per_channel,
    stored,
)
from passes.base import Effect, Outcome, Refusal
from passes.convolution import Window, window_of
from passes.pattern import (
    in_scope,
    input_of,
    new_constant,
    new_variable,
    only_consumer,
    producer,
    replace_node,
    rewrite_nodes,
    take_outputs,
    values_of,
)
from passes.scopes import label

SUMS = ("Add", "Sum")


class Reparameterize:
    """Implements `passes.base.Pass`."""

    name = "reparameterize"
    effect = Effect.REORDERS

    def call(self, graph: gs.Graph) -> Outcome:
        return rewrite_nodes(graph, _merge, SUMS) if graph.opset >= MINIMUM_OPSET else Outcome()


@dataclass(frozen=True)
class _Host:
    """A convolution that others are merged into."""

    node: gs.Node
    output: gs.Tensor
    source: gs.Tensor
    window: Window
    shape: tuple[int, ...]
    """Of the weight: [M, C/g, taps...]."""
    group: int

    @property
    def channels(self) -> Channels:
        """Of the output."""
        return Channels(self.shape[0], len(self.shape) - 2, len(self.shape))


@dataclass(frozen=True)
class _Branch:
    """A linear function of the host's source: kernel [M, C/g, taps...] and bias [M] in float64, and its window."""

    kernel: NDArray
    bias: NDArray
    window: Window
    nodes: tuple[gs.Node, ...] = ()
    """What the host makes superfluous."""


@dataclass(frozen=True)
class _Plan:
    host: _Host
    weight: gs.Constant
    bias: gs.Constant | None
    nodes: list[gs.Node]


def _merge(scope: gs.Graph, root: gs.Node) -> bool:
    """Rule 1, for each host in turn. Nothing changes before all of it is known to be possible."""
    terms, sums = _terms(scope, root)
    single = [term for term in terms if sum(term is other for other in terms) == 1]
    hosts = [host for term in single if (host := _host(scope, term)) is not None]
    hosts.sort(key=lambda host: -int(np.prod(host.window.kernel)))
    plans = []
    for host in hosts:
        if not any(term is host.output for term in terms):  # merged into an earlier one
            continue
        usable = [t for t in terms if t is not host.output and (t is host.source or any(t is s for s in single))]
        branches = {id(term): branch for term in usable if (branch := _branch(scope, term, host)) is not None}
        if branches:
            plans.append(_plan(host, [branches[id(term)] for term in terms if id(term) in branches]))
            terms = [term for term in terms if id(term) not in branches]
    if not plans:
        _explain(hosts)
        return False
    for plan in plans:
        inputs = [plan.host.source, plan.weight, *([] if plan.bias is None else [plan.bias])]
        plan.host.node.inputs = inputs
        for node in plan.nodes:
            replace_node(scope, node)
    _add_up(scope, root, terms)
    for node in sums:
        replace_node(scope, node)
    return True


def _terms(scope: gs.Graph, root: gs.Node) -> tuple[list[gs.Tensor], list[gs.Node]]:
    """What a tree of additions adds up, in order, and its inner nodes, each of which only its parent reads."""
    terms: list[gs.Tensor] = []
    sums: list[gs.Node] = []
    stack = [(root, tensor) for tensor in reversed(root.inputs)]
    while stack:
        parent, tensor = stack.pop()
        node = producer(tensor, *SUMS)
        once = sum(tensor is other for other in parent.inputs) == 1
        if node is not None and once and only_consumer(scope, tensor) is parent and in_scope(scope, node):
            sums.append(node)
            stack += [(node, operand) for operand in reversed(node.inputs)]
        else:
            terms.append(tensor)
    return terms, sums


def _host(scope: gs.Graph, term: gs.Tensor) -> _Host | None:
    node = producer(term, "Conv")
    if node is None or not in_scope(scope, node) or only_consumer(scope, term) is None:
        return None
    weight, bias = node.inputs[1], input_of(node, 2)
    if not is_float_constant(weight) or not (bias is None or is_float_constant(bias)):
        return None
    shape = tuple(int(size) for size in weight.shape)
    window = window_of(node, shape[2:])
    if window is None:
        return None
    return _Host(node, term, node.inputs[0], window, shape, int(node.attrs.get("group", 1)))


def _branch(scope: gs.Graph, term: gs.Tensor, host: _Host) -> _Branch | None:
    """Rules 2 to 6."""
    values = per_channel(term, host.channels)
    if values is not None:
        return _Branch(np.zeros(host.shape), values, host.window)
    affine, tensor, nodes = Affine.identity(host.shape[0]), term, []
    while tensor is not host.source:
        link = link_before(scope, tensor, host.channels, scope.opset)
        if link is None:
            break
        affine, tensor = link.affine.then(affine), link.operand
        nodes.append(link.node)
    linear = _linear(scope, tensor, host)
    if linear is None or linear.window.taps_in(host.window) is None:
        return None
    scale = affine.scale.reshape(-1, *[1] * (linear.kernel.ndim - 1))
    bias = linear.bias * affine.scale + affine.shift
    return _Branch(linear.kernel * scale, bias, linear.window, (*nodes, *linear.nodes))


def _linear(scope: gs.Graph, tensor: gs.Tensor, host: _Host) -> _Branch | None:
    """Rules 2 to 4: `tensor` as a kernel on the host's source."""
    keeps_channels = host.shape[0] == host.shape[1] * host.group
    zero = np.zeros(host.shape[0])
    if tensor is host.source:
        return _Branch(_diagonal(host, _point(host), 1.0), zero, _point(host)) if keeps_channels else None
    node = producer(tensor, "Conv", "AveragePool")
    if node is None or node.inputs[0] is not host.source or only_consumer(scope, tensor) is None:
        return None
    if node.op == "AveragePool":
        window = window_of(node, node.attrs["kernel_shape"])
        counts = window is not None and (node.attrs.get("count_include_pad", 0) or not window.pads)
        if window is None or not counts or node.attrs.get("ceil_mode", 0) or not keeps_channels:
            return None
        return _Branch(_diagonal(host, window, 1 / np.prod(window.kernel)), zero, window, (node,))
    other = _host(scope, tensor)
    if other is None or other.group != host.group:
        return None
    return _Branch(_wide(node.inputs[1]), _bias(other), other.window, (node,))


def _point(host: _Host) -> Window:
    """The window that reads one place and moves by 1."""
    ones, zeros = (1,) * len(host.window.kernel), (0,) * len(host.window.kernel)
    return Window(ones, ones, ones, zeros, zeros)


def _diagonal(host: _Host, window: Window, value: float) -> NDArray:
    """A kernel that gives output channel m `value` times each tap of input channel m."""
    outputs, inputs = host.shape[:2]
    kernel = np.zeros((outputs, inputs, *window.kernel))
    kernel[np.arange(outputs), np.arange(outputs) % inputs] = value
    return kernel


def _plan(host: _Host, branches: list[_Branch]) -> _Plan:
    """Adds the branches up. Raises Refusal where the sum overflows the host's type."""
    kernel, bias = _wide(host.node.inputs[1]), _bias(host)
    for branch in branches:
        taps = branch.window.taps_in(host.window)
        assert taps is not None
        kernel[np.ix_(range(host.shape[0]), range(host.shape[1]), *taps)] += branch.kernel
        bias = bias + branch.bias
    dtype, channel = numpy_dtype(host.node.inputs[1]), np.arange(host.shape[0])
    rows = channel.reshape(-1, *[1] * (kernel.ndim - 1))
    weight = new_constant(host.output, "merged_weight", stored(kernel, dtype, rows, "weight"))
    keeps_bias = bias.any() or input_of(host.node, 2) is not None
    shift = new_constant(host.output, "merged_bias", stored(bias, dtype, channel, "bias")) if keeps_bias else None
    return _Plan(host, weight, shift, [node for branch in branches for node in branch.nodes])


def _wide(weight: gs.Tensor) -> NDArray:
    return np.array(values_of(weight)).astype(np.float64)


def _bias(host: _Host) -> NDArray:
    bias = input_of(host.node, 2)
    return np.zeros(host.shape[0]) if bias is None else _wide(bias)


def _add_up(scope: gs.Graph, root: gs.Node, terms: list[gs.Tensor]) -> None:
    """Replace `root` by the sum of what is left; one term is a host's output and takes its name."""
    output = take_outputs(root)[0]
    adds: list[gs.Node] = []
    total = terms[0]
    for number, term in enumerate(terms[1:]):
        last = number == len(terms) - 2
        known = output.shape if total.shape == term.shape == output.shape else None
        made = output if last else new_variable(output, f"sum_{number}", known)
        adds.append(gs.Node("Add", f"{made.name}/add", inputs=[total, term], outputs=[made]))
        total = made
    replace_node(scope, root, *adds)
    if not adds:
        terms[0].inputs[0].outputs = [output]


def _explain(hosts: list[_Host]) -> None:
    """Raises Refusal for two convolutions of one tensor that were added and could not be merged."""
    for first, second in combinations(hosts, 2):
        if first.source is not second.source:
            continue
        a, b = (f"'{label(host.node)}'" for host in (first, second))
        if first.group != second.group:
            raise Refusal(f"it adds {a} and {b}, with group {first.group} and {second.group}, expected equal ones")
        raise Refusal(f"it adds {a} and {b}, but neither window holds the other: {first.window} and {second.window}")
