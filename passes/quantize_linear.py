"""Products with 16-bit weights become Kiln's CUDA operators with weights of 8 or 4 bits.

1. `kiln::Linear(x, W, [b])` -> `kiln::QuantLinear(x, W', scales, [b])`;
2. `kiln::LinearSwiGlu(x, W, [b])` -> `kiln::QuantLinearSwiGlu(x, W', scales, [b])`.

W is a constant; W' holds its bytes as the kernels read them (plugins/quant_matmul/cuda_packing.py). A layer is the
node, under the name that its product had before `passes.bind_linear`; its plan says the scheme:

    w8a8-dynamic  int8, one scale for each output; beyond `kernel_rows` rows x is quantised, too, each row by itself
    fp8           the same with float8e4m3fn
    w4a16         int4, scales by group; x stays as it is

Without a plan all layers get one scheme. Layers that the kernels cannot have are left alone with a note; where a plan
names them, that is an error.
"""

from collections.abc import Mapping

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.base import Effect, Outcome
from passes.pattern import new_constant, replace_node, take_outputs, values_of
from passes.quantization.cuda_schemes import DEFAULT_ROWS, FORMAT_OF, GROUP, plan_problem, shape_problem
from passes.quantization.plan import LayerPlan, PrecisionPlan, Rounding, Scheme
from passes.quantization.weights import quantised_for_cuda
from plugins.dense.schema import LINEAR, LINEAR_SWIGLU
from plugins.errors import KilnError
from plugins.quant_matmul.cuda_packing import pack
from plugins.quant_matmul.cuda_schema import FORMATS, QUANT_LINEAR, QUANT_LINEAR_SWIGLU

_QUANTISED = {LINEAR.op_type: QUANT_LINEAR.op_type, LINEAR_SWIGLU.op_type: QUANT_LINEAR_SWIGLU.op_type}


class QuantizeLinear:
    """Implements `passes.base.Pass`.

    `moments`: second moments [depth, depth] of a layer's activation by its name, for GPTQ. Without a `plan` every layer
    gets `scheme`, int4 in groups of 128.
    """

    name = "quantize_linear"
    effect = Effect.QUANTISES

    def __init__(
        self,
        plan: PrecisionPlan | None = None,
        moments: Mapping[str, NDArray] | None = None,
        scheme: Scheme = "w8a8-dynamic",
        rounding: Rounding = "rtn",
    ) -> None:
        if scheme not in FORMAT_OF:
            raise ValueError(f"scheme is {scheme!r}; expected one of {', '.join(FORMAT_OF)}")
        group = GROUP if scheme == "w4a16" else 0
        self.plan, self.moments = plan, moments or {}
        self._usual = LayerPlan(scheme, group, rounding if scheme != "fp8" else "rtn")

    def call(self, graph: gs.Graph) -> Outcome:
        outcome = Outcome()
        for node in [node for node in graph.nodes if node.domain == LINEAR.domain and node.op in _QUANTISED]:
            plan = self._usual if self.plan is None else self.plan.of(node.name)
            if plan.scheme == "float":
                continue
            if problem := self._problem(node, plan):
                if self.plan is not None:
                    raise KilnError(
                        f"layer {node.name} cannot be {plan.scheme}: {problem}; keep it: --keep {node.name}"
                    )
                outcome.notes.append(f"{node.name}: {problem}")
                continue
            self._quantise(graph, node, plan)
            outcome.rewrites += 1
        self._require_all(graph)
        return outcome

    def _problem(self, node: gs.Node, plan: LayerPlan) -> str | None:
        if plan.scheme not in FORMAT_OF:
            return f"Kiln's CUDA products have {', '.join(FORMAT_OF)}"
        if not isinstance(node.inputs[1], gs.Constant):
            return "its weight is no constant"
        rows, depth = node.inputs[1].shape
        width = rows // 2 if node.op == LINEAR_SWIGLU.op_type else rows
        return shape_problem(FORMAT_OF[plan.scheme], depth, width) or plan_problem(plan)

    def _quantise(self, graph: gs.Graph, node: gs.Node, plan: LayerPlan) -> None:
        values = values_of(node.inputs[1])
        assert values is not None
        form = FORMAT_OF[plan.scheme]
        w, scales = quantised_for_cuda(node.name, values.astype(np.float32).T, plan, self.moments.get(node.name))
        y = node.outputs[0]
        weight, scale = new_constant(y, "packed_weight", pack(w, form)), new_constant(y, "weight_scale", scales)
        attributes = {
            "format": FORMATS.index(form),
            "group_size": plan.group_size,
            "kernel_rows": DEFAULT_ROWS if plan.kernel_rows is None else plan.kernel_rows,
        }
        inputs = [node.inputs[0], weight, scale, *node.inputs[2:]]
        made = gs.Node(_QUANTISED[node.op], node.name, attributes, inputs, take_outputs(node), LINEAR.domain)
        replace_node(graph, node, made)

    def _require_all(self, graph: gs.Graph) -> None:
        """Raise KilnError for a planned layer that is no product of Kiln's."""
        if self.plan is None:
            return
        have = {node.name for node in graph.nodes if node.domain == LINEAR.domain and node.op in _QUANTISED.values()}
        if missing := [name for name in self.plan.quantised if name not in have]:
            raise KilnError(
                f"layer {missing[0]} is planned as {self.plan.of(missing[0]).scheme}, but is no product of Kiln's on "
                f"CUDA (passes.bind_linear says which are); keep it: --keep {missing[0]}"
            )
