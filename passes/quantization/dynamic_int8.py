"""Layers planned as w8a8-dynamic or w4a8-dynamic: each row of activations gets its own scale, computed in the engine.

1. `MatMul(x, W) [+ b]`, `Gemm(x, W, b)` -> `kiln::Int8MatMul(kiln::QuantizeRows(x), W', scales, [b], [zeros])` where
   the engine has Kiln's operators;
2. the same -> `MatMulInteger(q, W') * scale(x) * scales + b` elsewhere, q and scale(x) = max|x| / 127 of each row by
   plain operators, for 8-bit weights with one scale for each output.

All products of one activation, in groups of one size, share what quantises it. Never DynamicQuantizeLinear: its one
scale for a whole tensor would make a request's result depend on those that share its batch. A row with a NaN or an
infinity stays visible: its results are NaN.
"""

from collections.abc import Mapping

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray
from onnx import TensorProto

from passes.base import Effect, Outcome
from passes.pattern import insert_before, new_constant, new_variable
from passes.quantization.plan import DYNAMIC, PrecisionPlan
from passes.quantization.products import Product, products_of
from passes.quantization.quantize_weights import packed_weights
from passes.quantization.rescale import Rescaled
from passes.quantization.support import Kernels, require_supported
from passes.quantization.weights import quantise_weight, zeros_of
from plugins.errors import KilnError
from plugins.quant_matmul.schema import INT8_MATMUL, QUANTIZE_ROWS

_AXES_AS_INPUT_SINCE = 18
_SMALLEST = 2.0**-100
"""Rows with a smaller largest magnitude count as zeros, as in `plugins.quant_matmul`."""

Quantised = tuple[gs.Variable, gs.Variable]
"""q and scale."""


class DynamicInt8:
    """Implements `passes.base.Pass`. `moments` [depth, depth] by layer name are for GPTQ."""

    name = "dynamic_int8"
    effect = Effect.QUANTISES

    def __init__(
        self,
        plan: PrecisionPlan,
        kernels: Kernels = "cpu",
        moments: Mapping[str, NDArray] | None = None,
        rescaled: Rescaled | None = None,
    ) -> None:
        self.plan = plan
        self.kernels: Kernels = kernels
        self.moments = moments or {}
        self.rescaled = Rescaled() if rescaled is None else rescaled

    def call(self, graph: gs.Graph) -> Outcome:
        products = products_of(graph, self.plan, DYNAMIC)
        rows: dict[tuple[str, int], Quantised] = {}
        for product in products:
            require_supported(product.layer, product.plan, self.kernels)
            _require_types(graph, product)
            group = product.plan.activation_group_size
            key = (product.activation.name, group)
            if self.kernels == "cpu-plugins":
                if key not in rows:
                    rows[key] = _kiln_rows(graph, product, group)
                self._with_kiln(graph, product, rows[key])
            else:
                if key not in rows:
                    rows[key] = _plain_rows(graph, product, "uint8" if self.kernels == "cpu" else "int8")
                self._with_plain(graph, product, rows[key])
        return Outcome(len(products))

    def _with_kiln(self, graph: gs.Graph, product: Product, rows: Quantised) -> None:
        moments, zeros = self.rescaled.moments(product.layer, self.moments), zeros_of(product.plan, self.kernels)
        found = quantise_weight(product.layer.name, product.weight, product.plan, moments, zeros)
        attributes = {
            "n": product.layer.width,
            "bits": found.grid.bits,
            "group_size": found.grid.group_size,
            "activation_group_size": product.plan.activation_group_size,
        }
        inputs = [*rows, *packed_weights(product, found)]
        spec = INT8_MATMUL
        product.replace(graph, gs.Node(spec.op_type, product.layer.name, attributes, inputs, domain=spec.domain))

    def _with_plain(self, graph: gs.Graph, product: Product, rows: Quantised) -> None:
        layer, result = product.layer, product.result
        moments = self.rescaled.moments(layer, self.moments)
        found = quantise_weight(layer.name, product.weight, product.plan, moments)
        q, scale = rows
        zero = np.array(128 if q.dtype == np.uint8 else 0, q.dtype)
        weight, row_zero = new_constant(result, "weight", found.integers), new_constant(result, "zero", zero)
        whole = new_variable(result, "integers", result.shape, np.int32)
        real, by_row = (new_variable(result, name, result.shape) for name in ("real", "by_row"))
        nodes = [
            gs.Node("MatMulInteger", layer.name, {}, [q, weight, row_zero], [whole]),
            gs.Node("Cast", real.name, {"to": int(TensorProto.FLOAT)}, [whole], [real]),
            gs.Node("Mul", by_row.name, {}, [real, scale], [by_row]),
            gs.Node("Mul", f"{result.name}/by_output", {}, [by_row, new_constant(result, "scale", found.scales[:, 0])]),
        ]
        if product.bias is not None:
            nodes[-1].outputs = [new_variable(result, "by_output", result.shape)]
            inputs = [nodes[-1].outputs[0], new_constant(result, "bias", product.bias)]
            nodes.append(gs.Node("Add", f"{result.name}/biased", {}, inputs))
        product.replace(graph, *nodes)


def _require_types(graph: gs.Graph, product: Product) -> None:
    if product.dtype != np.float32:
        raise KilnError(
            f"layer {product.layer.name} is planned as {product.plan.scheme}, but has {product.dtype} weights; "
            "its rows are quantised from float32: build it with --precision fp32"
        )
    if graph.opset < 13:
        raise KilnError(
            f"layer {product.layer.name} is planned as {product.plan.scheme}, which needs opset 13; the model has "
            f"{graph.opset}: export it with a newer one"
        )


def _kiln_rows(graph: gs.Graph, product: Product, group: int) -> Quantised:
    x, spec = product.activation, QUANTIZE_ROWS
    suffix = f"rows_by_{group}" if group else "rows"
    leading = None if x.shape is None else list(x.shape[:-1])
    groups = -(-product.layer.depth // group) if group else 1
    q = new_variable(x, f"{suffix}/q", x.shape, np.int8)
    scale = new_variable(x, f"{suffix}/scale", None if leading is None else [*leading, groups], np.float32)
    node = gs.Node(spec.op_type, f"{x.name}/{suffix}", {"group_size": group}, [x], [q, scale], domain=spec.domain)
    insert_before(graph, product.node, node)
    return q, scale


def _plain_rows(graph: gs.Graph, product: Product, stored: str) -> Quantised:
    """scale = max|x| / 127 + 0 * sum(x), of which the second term is there for NaN, which ReduceMax may pass over."""
    x = product.activation
    column = None if x.shape is None else [*x.shape[:-1], 1]
    made: list[gs.Node] = []

    def node(op: str, name: str, inputs: list[gs.Tensor], shape: list | None, attrs: dict | None = None) -> gs.Variable:
        result = new_variable(x, f"rows/{name}", shape, np.float32)
        made.append(gs.Node(op, result.name, attrs or {}, inputs, [result]))
        return result

    def constant(name: str, value: float) -> gs.Constant:
        return new_constant(x, f"rows/{name}", np.array(value, np.float32))

    axes = new_constant(x, "rows/axes", np.array([-1], np.int64))
    by_input = graph.opset >= _AXES_AS_INPUT_SINCE
    attrs = {"keepdims": 1} if by_input else {"keepdims": 1, "axes": [-1]}
    magnitude = node("Abs", "abs", [x], x.shape)
    largest = node("ReduceMax", "max", [magnitude, axes] if by_input else [magnitude], column, attrs)
    total = node("ReduceSum", "sum", [x, axes], column, {"keepdims": 1})
    nothing = node("Mul", "nothing", [total, constant("zero", 0.0)], column)
    scaled = node("Div", "largest", [largest, constant("high", 127.0)], column)
    scale = node("Add", "scale", [scaled, nothing], column)
    step = node("Max", "step", [scale, constant("smallest", _SMALLEST)], column)
    units = node("Round", "rounded", [node("Div", "units", [x, step], x.shape)], x.shape)
    if stored == "uint8":
        units = node("Add", "shifted", [units, constant("offset", 128.0)], x.shape)
    kind = TensorProto.UINT8 if stored == "uint8" else TensorProto.INT8
    q = new_variable(x, "rows/q", x.shape, np.dtype(stored))
    made.append(gs.Node("Cast", q.name, {"to": int(kind)}, [units], [q]))
    insert_before(graph, product.node, *made)
    return q, scale
