"""The CUDA library's products and token-wise operators through onnxruntime-gpu, by kernels and by cuBLAS."""

from collections.abc import Callable

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from plugins.cuda_build import cuda_library
from plugins.dense.reference import linear, linear_swiglu
from plugins.dense.schema import LINEAR, LINEAR_SWIGLU
from plugins.elementwise.reference import add_rms_norm, swiglu
from plugins.elementwise.schema import ADD_RMS_NORM, SWIGLU
from plugins.spec import OperatorSpec

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif("CUDAExecutionProvider" not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
]

LIMITS = {"float16": 1.5e-3, "bfloat16": 1e-2}
"""Of ||y - reference|| / ||reference||: the rounding of y, and of what SwiGLU takes from cuBLAS."""
Reference = Callable[..., NDArray[np.float64]]
TYPES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


def random(seed: int, dtype: str, *shape: int, scale: float = 1.0) -> "torch.Tensor":
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(getattr(torch, dtype))


def wide(tensor: "torch.Tensor") -> NDArray:
    return tensor.double().cpu().numpy()


class Session:
    """One node, whose operands are tensors on the device."""

    def __init__(self, spec: OperatorSpec, inputs: int, dtype: str, graph: bool = False, **attributes: int):
        names = [[one.name for one in side] for side in (spec.inputs[:inputs], spec.outputs)]
        node = helper.make_node(spec.op_type, *names, domain=spec.domain, **attributes)
        described = [[helper.make_tensor_value_info(name, TYPES[dtype], None) for name in side] for side in names]
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(spec.domain, spec.since_version)]
        model = helper.make_model(
            helper.make_graph([node], "one_node", *described), opset_imports=opsets, ir_version=10
        )
        major, minor = torch.cuda.get_device_capability()
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.register_custom_ops_library(str(cuda_library([f"sm_{major}{minor}"])))
        cuda = ("CUDAExecutionProvider", {"enable_cuda_graph": str(int(graph))})
        self._session = ort.InferenceSession(model.SerializeToString(), options, providers=[cuda])
        self._type, self._names = TYPES[dtype], names
        self._somewhere = torch.empty(16, device="cuda")  # of tensors without elements, which torch gives no address

    def run(self, inputs: "list[torch.Tensor]", outputs: "list[torch.Tensor]") -> None:
        binding = self._session.io_binding()
        torch.cuda.synchronize()
        sides = zip((binding.bind_input, binding.bind_output), self._names, (inputs, outputs), strict=True)
        for bind, names, tensors in sides:
            for name, tensor in zip(names, tensors, strict=True):
                pointer = tensor.data_ptr() or self._somewhere.data_ptr()
                bind(name, "cuda", 0, self._type, tuple(tensor.shape), pointer)
        self._session.run_with_iobinding(binding)


def check(y: "torch.Tensor", expected: NDArray, dtype: str) -> None:
    error = np.linalg.norm(wide(y) - expected) / np.linalg.norm(expected)
    assert error < LIMITS[dtype]


@pytest.mark.parametrize("dtype", sorted(TYPES))
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kernel_rows", [0, 32])
@pytest.mark.parametrize(("spec", "reference"), [(LINEAR, linear), (LINEAR_SWIGLU, linear_swiglu)])
def test_products(spec: OperatorSpec, reference: Reference, kernel_rows: int, with_bias: bool, dtype: str) -> None:
    width, depth = 136, 200
    weight_rows = width if spec is LINEAR else 2 * width
    weight, bias = random(1, dtype, weight_rows, depth, scale=depth**-0.5), random(2, dtype, weight_rows)
    constants = [weight, bias] if with_bias else [weight]
    session = Session(spec, 1 + len(constants), dtype, kernel_rows=kernel_rows)
    for shape in ((1,), (32,), (33,), (2, 70), (0,)):
        x = random(3, dtype, *shape, depth)
        y = torch.full((*shape, width), float("nan"), dtype=x.dtype, device="cuda")
        session.run([x, *constants], [y])
        if x.numel():
            check(y, reference(wide(x), *map(wide, constants)), dtype)


@pytest.mark.parametrize("rows", [4, 40])
def test_cuda_graph_follows_new_inputs(rows: int) -> None:
    session = Session(LINEAR_SWIGLU, 2, "bfloat16", graph=True, kernel_rows=32)
    x, weight = random(1, "bfloat16", rows, 512), random(2, "bfloat16", 2048, 512, scale=0.05)
    y = torch.empty(rows, 1024, dtype=x.dtype, device="cuda")
    for seed in (3, 4, 5, 6):  # one plain run, one that captures, two replays
        x.copy_(random(seed, "bfloat16", rows, 512))
        y.fill_(float("nan"))
        session.run([x, weight], [y])
        check(y, linear_swiglu(wide(x), wide(weight)), "bfloat16")


@pytest.mark.parametrize("dtype", sorted(TYPES))
def test_token_wise_operators(dtype: str) -> None:
    x, skip, gamma = random(1, dtype, 2, 3, 520), random(2, dtype, 2, 3, 520), random(3, dtype, 520)
    normalized, total, gated = (torch.full_like(x, float("nan")) for _ in range(3))
    Session(ADD_RMS_NORM, 3, dtype).run([x, skip, gamma], [normalized, total])
    assert torch.equal(total, x + skip)
    check(normalized, add_rms_norm(wide(total), np.zeros(x.shape), wide(gamma))[0], dtype)
    Session(SWIGLU, 2, dtype).run([x, skip], [gated])
    check(gated, swiglu(wide(x), wide(skip)), dtype)


def test_errors_name_what_is_wrong() -> None:
    session = Session(LINEAR, 2, "float16", kernel_rows=32)
    y = torch.empty(1, 8, dtype=torch.float16, device="cuda")
    with pytest.raises(Exception, match="weight has the wrong shape"):
        session.run([random(1, "float16", 1, 64), random(2, "float16", 8, 32)], [y])
    with pytest.raises(Exception, match="depth: expected a multiple of 8"):
        session.run([random(1, "float16", 1, 63), random(2, "float16", 8, 63)], [y])
    with pytest.raises(Exception, match="kernel_rows must be 0"):
        Session(LINEAR, 2, "float16", kernel_rows=33)
