"""Any of the CUDA library's operators by itself, as a model of one node in onnxruntime-gpu.

What `one_node` is for the CPU library; operands are tensors on the device.
"""

import functools
from collections.abc import Callable, Sequence

import onnx
import onnxruntime as ort
from onnx import helper

from plugins.spec import OperatorSpec

from .conftest import ONNX_TYPES
from .cuda_tensors import library_path, torch


def cuda_session(model: onnx.ModelProto, graph: bool = False) -> ort.InferenceSession:
    """With the library's operators; `graph` lets onnxruntime capture its second run and replay it from then on."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library_path()))
    cuda = ("CUDAExecutionProvider", {"enable_cuda_graph": str(int(graph))})
    return ort.InferenceSession(model.SerializeToString(), options, providers=[cuda])


def bind(to: Callable[..., None], name: str, tensor: "torch.Tensor") -> None:
    """`to` is `bind_input` or `bind_output` of a binding."""
    element = ONNX_TYPES[str(tensor.dtype).removeprefix("torch.")]
    to(name, "cuda", 0, int(element), tuple(tensor.shape), tensor.data_ptr() or _somewhere().data_ptr())


@functools.cache
def _somewhere() -> "torch.Tensor":
    """Where tensors without elements lie, which torch gives no address."""
    return torch.empty(16, device="cuda")


class Node:
    """An operator with its first `len(types)` inputs, each of its type; outputs are of the first input's."""

    def __init__(self, spec: OperatorSpec, types: Sequence[str], graph: bool = False, **attributes: int | str) -> None:
        inputs = [one.name for one in spec.inputs[: len(types)]]
        outputs = [one.name for one in spec.outputs]
        node = helper.make_node(spec.op_type, inputs, outputs, domain=spec.domain, **attributes)
        described = [
            [helper.make_tensor_value_info(name, ONNX_TYPES[kind], None) for name, kind in zip(*side, strict=True)]
            for side in ((inputs, types), (outputs, types[:1] * len(outputs)))
        ]
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(spec.domain, spec.since_version)]
        made = helper.make_graph([node], "one_node", *described)
        self._session = cuda_session(helper.make_model(made, opset_imports=opsets, ir_version=10), graph)
        self._names = inputs, outputs

    def run(self, inputs: "list[torch.Tensor]", outputs: "list[torch.Tensor]") -> None:
        binding = self._session.io_binding()
        torch.cuda.synchronize()
        sides = zip((binding.bind_input, binding.bind_output), self._names, (inputs, outputs), strict=True)
        for to, names, tensors in sides:
            for name, tensor in zip(names, tensors, strict=True):
                bind(to, name, tensor)
        self._session.run_with_iobinding(binding)
