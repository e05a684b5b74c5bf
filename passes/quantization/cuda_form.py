"""What Kiln's CUDA products compute, in standard operators on FP32, so that a machine without a GPU can judge it.

    x' [.., depth], t [.., 1] = quantised rows and their scales beyond `kernel_rows` rows, else x and 1
    y = (x' w^T) * scale * t + bias                one scale for each output
    y = x (w * scale)^T + bias                     scales by group of the depth
    y = gate * sigmoid(gate) * up                  of SwiGLU, the two halves of such a y

w are the integers or e4m3 numbers as they are stored. That is the operators' own arithmetic
(plugins/quant_matmul/cuda_schema.py): rows and weights are rounded as they say, to the bit, and sums are FP32 in
another order. `kiln::QuantizeRows` of the CPU's library quantises rows to int8.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.base import Effect, Outcome
from passes.pattern import STANDARD
from passes.precision_islands import FP32
from passes.quantization.cuda_schemes import DEFAULT_ROWS, FORMAT_OF
from passes.quantization.plan import PrecisionPlan
from passes.quantization.products import Product, products_of
from passes.quantization.rescale import Rescaled
from passes.quantization.weights import quantised_for_cuda
from plugins.quant_matmul.cuda_schema import WeightFormat
from plugins.quant_matmul.schema import QUANTIZE_ROWS

_SMALLEST, _FLOAT8 = 2.0**-100, 448.0


@dataclass(frozen=True)
class QuantisedWeight:
    """w [rows, depth] and scales [groups, rows] of one product; int4's w is int8."""

    w: NDArray[np.generic]
    scales: NDArray[np.float32]
    form: WeightFormat
    group_size: int
    kernel_rows: int


class StandardForm:
    """The nodes of one product with FP32 operands; `run` gives them, the last of which makes `y`.

    The node that makes the product without its bias is called `name`.
    """

    def __init__(self, name: str, x: gs.Tensor, y: gs.Tensor) -> None:
        self._name, self._x, self._y = name, x, y
        self._nodes: list[gs.Node] = []

    def run(self, weight: gs.Tensor | QuantisedWeight, bias: gs.Tensor | None, swiglu: bool) -> list[gs.Node]:
        """`weight`: FP32 [rows, depth], or a quantised one."""
        if isinstance(weight, QuantisedWeight):
            product = self._by_group(weight) if weight.group_size else self._by_output(weight)
        else:
            product = self._product(self._x, weight)
        self._nodes[-1].name = self._name
        if bias is not None:
            product = self._one("Add", product, bias)
        if swiglu:
            gate, up = self._many("Split", [product], 2, axis=-1, num_outputs=2)
            self._one("Mul", self._one("Mul", gate, self._one("Sigmoid", gate)), up)
        self._nodes[-1].outputs[0] = self._y
        return self._nodes

    def _product(self, x: gs.Tensor, weight: gs.Tensor) -> gs.Variable:
        return self._one("MatMul", x, self._one("Transpose", weight, perm=[1, 0]))

    def _by_output(self, weight: QuantisedWeight) -> gs.Variable:
        scale = self._constant("scale", weight.scales[0])
        if weight.form == "int4":
            return self._one("Mul", self._product(self._x, self._wide(weight.w)), scale)
        rows, row_scales = self._rows(weight)
        scaled = self._one("Mul", self._product(rows, self._wide(weight.w)), scale)
        return self._one("Mul", scaled, row_scales)

    def _by_group(self, weight: QuantisedWeight) -> gs.Variable:
        (rows, depth), groups = weight.w.shape, len(weight.scales)
        padded = np.zeros((rows, groups * weight.group_size), weight.w.dtype)
        padded[:, :depth] = weight.w
        by_group = self._wide(padded.reshape(rows, groups, weight.group_size))
        scaled = self._one("Mul", by_group, self._constant("scale", weight.scales.T[:, :, None]))
        whole = self._one("Reshape", scaled, self._constant("shape", np.array([rows, -1])))
        bounds = [self._constant(name, np.array([value])) for name, value in (("from", 0), ("to", depth), ("axis", 1))]
        return self._product(self._x, self._one("Slice", whole, *bounds))

    def _rows(self, weight: QuantisedWeight) -> tuple[gs.Variable, gs.Variable]:
        """x' and t: which of the two forms holds depends on the number of rows in the call."""
        if weight.form == "int8":
            q, scales = self._many(QUANTIZE_ROWS.op_type, [self._x], 2, domain=QUANTIZE_ROWS.domain, group_size=0)
            q.dtype = np.dtype(np.int8)
            rows = self._cast(q, onnx.TensorProto.FLOAT)
        else:
            # TopK, because ONNX Runtime 1.31's ReduceMax gives another shape where there are no rows.
            one = self._constant("one", np.array([1]))
            largest, place = self._many("TopK", [self._one("Abs", self._x), one], 2, axis=-1)
            place.dtype = np.dtype(np.int64)
            largest = self._one("Max", largest, self._constant("smallest", np.array(_SMALLEST, np.float32)))
            top = self._constant("top", np.array(_FLOAT8, np.float32))
            units = self._one("Mul", self._x, self._one("Div", top, largest))
            rows = self._cast(self._cast(units, onnx.TensorProto.FLOAT8E4M3FN), onnx.TensorProto.FLOAT)
            scales = self._one("Div", largest, top)
        depth = weight.w.shape[1]
        values = self._one("Size", self._x, dtype=np.dtype(np.int64))
        most = self._constant("most", np.array(weight.kernel_rows * depth))
        many = self._one("Greater", values, most, dtype=np.dtype(np.bool_))
        one = self._constant("one", np.array(1, np.float32))
        return self._one("Where", many, rows, self._x), self._one("Where", many, scales, one)

    def _wide(self, w: NDArray[np.generic]) -> gs.Variable:
        """As FP32 numbers; stored as int8, or as float16, which holds every e4m3 number."""
        stored = w if w.dtype == np.int8 else w.astype(np.float16)
        return self._cast(self._constant("weight", stored), onnx.TensorProto.FLOAT)

    def _cast(self, tensor: gs.Tensor, to: int) -> gs.Variable:
        return self._many("Cast", [tensor], 1, np.dtype(onnx.helper.tensor_dtype_to_np_dtype(to)), to=int(to))[0]

    def _constant(self, name: str, values: NDArray) -> gs.Constant:
        return gs.Constant(f"{self._y.name}/cpu{len(self._nodes)}/{name}", np.ascontiguousarray(values))

    def _one(self, op: str, *operands: gs.Tensor, dtype: np.dtype = FP32, **attributes: Any) -> gs.Variable:
        return self._many(op, list(operands), 1, dtype, **attributes)[0]

    def _many(
        self,
        op: str,
        operands: Sequence[gs.Tensor],
        outputs: int,
        dtype: np.dtype = FP32,
        domain: str = STANDARD,
        **attributes: Any,
    ) -> list[gs.Variable]:
        name = f"{self._y.name}/cpu{len(self._nodes)}"
        results = [gs.Variable(f"{name}_{n}", dtype) for n in range(outputs)]
        self._nodes.append(gs.Node(op, name, attributes, list(operands), results, domain=domain))
        return results


class SimulateCuda:
    """Implements `passes.base.Pass`: products of an FP32 graph as they will be on CUDA, but for 16-bit activations.

    For trying plans out before the graph is cast; never for an engine.
    """

    name = "simulate_cuda"
    effect = Effect.QUANTISES

    def __init__(self, plan: PrecisionPlan, moments: Mapping[str, NDArray], rescaled: Rescaled) -> None:
        self.plan, self.moments, self.rescaled = plan, moments, rescaled

    def call(self, graph: gs.Graph) -> Outcome:
        products = products_of(graph, self.plan, tuple(FORMAT_OF))
        for product in products:
            self._simulate(graph, product)
        return Outcome(len(products))

    def _simulate(self, graph: gs.Graph, product: Product) -> None:
        plan, name = product.plan, product.layer.name
        moments = self.rescaled.moments(product.layer, self.moments)
        rows = DEFAULT_ROWS if plan.kernel_rows is None else plan.kernel_rows
        w, scales = quantised_for_cuda(name, product.weight, plan, moments)
        weight = QuantisedWeight(w, scales, FORMAT_OF[plan.scheme], plan.group_size, rows)
        bias = None if product.bias is None else gs.Constant(f"{product.result.name}/bias", product.bias)
        product.replace(graph, *StandardForm(name, product.activation, product.result).run(weight, bias, False))
