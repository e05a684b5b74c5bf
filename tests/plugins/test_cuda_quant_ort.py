"""Products with weights of 8 or 4 bits through onnxruntime-gpu: by the kernels, by cuBLASLt, and in CUDA graphs."""

from collections.abc import Callable

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from plugins.cuda_build import cuda_library
from plugins.dense.reference import linear, linear_swiglu
from plugins.quant_matmul.cuda_packing import pack, quantize, quantized_rows, restored
from plugins.quant_matmul.cuda_schema import FORMATS, QUANT_LINEAR, QUANT_LINEAR_SWIGLU, WeightFormat
from plugins.spec import OperatorSpec

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif("CUDAExecutionProvider" not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
]

LIMITS = {"float16": 2e-3, "bfloat16": 1.2e-2}
"""Of ||y - reference|| / ||reference||: the rounding of y, and of the halves that SwiGLU takes from cuBLASLt."""
WIDTH, DEPTH = 144, 224
Reference = Callable[..., NDArray[np.float64]]


def session(spec: OperatorSpec, dtype: str, graph: bool = False, **attributes: int) -> ort.InferenceSession:
    major, minor = torch.cuda.get_device_capability()
    types = [{"uint8": "uint8", "float32": "float"}.get(one.dtypes[0], dtype) for one in spec.inputs]
    names = [one.name for one in spec.inputs]
    node = helper.make_node(spec.op_type, names, ["y"], domain=spec.domain, **attributes)
    described = [
        helper.make_tensor_value_info(name, getattr(TensorProto, one.upper()), None)
        for name, one in zip((*names, "y"), (*types, dtype), strict=True)
    ]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(spec.domain, spec.since_version)]
    made = helper.make_graph([node], "one_node", described[:-1], described[-1:])
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(cuda_library([f"sm_{major}{minor}"])))
    cuda = ("CUDAExecutionProvider", {"enable_cuda_graph": str(int(graph))})
    model = helper.make_model(made, opset_imports=opsets, ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), options, providers=[cuda])


def run(one: ort.InferenceSession, inputs: "list[torch.Tensor]", y: "torch.Tensor") -> None:
    types = {torch.float16: 10, torch.bfloat16: 16, torch.uint8: 2, torch.float32: 1}
    binding = one.io_binding()
    torch.cuda.synchronize()
    for node, tensor in zip((*one.get_inputs(), *one.get_outputs()), (*inputs, y), strict=True):
        bind = binding.bind_output if node.name == "y" else binding.bind_input
        bind(node.name, "cuda", 0, types[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
    one.run_with_iobinding(binding)


def random(seed: int, dtype: str, *shape: int) -> "torch.Tensor":
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(getattr(torch, dtype))


def constants(form: WeightFormat, rows: int, dtype: str) -> "tuple[list[torch.Tensor], NDArray]":
    """Weight, scale and bias, and what the weight stands for."""
    values = np.random.default_rng(1).standard_normal((rows, DEPTH)).astype(np.float32) * DEPTH**-0.5
    w, scales = quantize(values, form)
    packed, scale = torch.from_numpy(pack(w, form)).cuda(), torch.from_numpy(scales).cuda()
    return [packed, scale, random(2, dtype, rows)], restored(w, scales)


def wide(tensor: "torch.Tensor") -> NDArray:
    return tensor.double().cpu().numpy()


@pytest.mark.parametrize("dtype", sorted(LIMITS))
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("spec", "reference"), [(QUANT_LINEAR, linear), (QUANT_LINEAR_SWIGLU, linear_swiglu)])
def test_products(spec: OperatorSpec, reference: Reference, form: WeightFormat, dtype: str) -> None:
    rows = WIDTH if spec is QUANT_LINEAR else 2 * WIDTH
    given, values = constants(form, rows, dtype)
    one = session(spec, dtype, format=FORMATS.index(form), kernel_rows=32)
    for shape in ((1,), (32,), (33,), (2, 70)):
        x = random(3, dtype, *shape, DEPTH)
        y = torch.full((*shape, WIDTH), float("nan"), dtype=x.dtype, device="cuda")
        run(one, [x, *given], y)
        multiplied = wide(x) if form == "int4" or np.prod(shape) <= 32 else quantized_rows(wide(x), form)
        expected = reference(multiplied, values, wide(given[2]))
        assert np.linalg.norm(wide(y) - expected) / np.linalg.norm(expected) < LIMITS[dtype]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [4, 40])
def test_cuda_graph_follows_new_inputs(rows: int, form: WeightFormat) -> None:
    given, values = constants(form, 2 * WIDTH, "bfloat16")
    one = session(QUANT_LINEAR_SWIGLU, "bfloat16", graph=True, format=FORMATS.index(form), kernel_rows=32)
    x, y = random(1, "bfloat16", rows, DEPTH), torch.empty(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
    for seed in (3, 4, 5, 6):  # one plain run, one that captures, two replays
        x.copy_(random(seed, "bfloat16", rows, DEPTH))
        y.fill_(float("nan"))
        run(one, [x, *given], y)
        multiplied = wide(x) if form == "int4" or rows <= 32 else quantized_rows(wide(x), form)
        expected = linear_swiglu(multiplied, values, wide(given[2]))
        assert np.linalg.norm(wide(y) - expected) / np.linalg.norm(expected) < LIMITS["bfloat16"]


def test_errors_name_what_is_wrong() -> None:
    given, _ = constants("int8", WIDTH, "float16")
    y = torch.empty(1, WIDTH, dtype=torch.float16, device="cuda")
    one = session(QUANT_LINEAR, "float16", format=0)
    with pytest.raises(Exception, match="weight has the wrong shape"):
        run(one, [random(1, "float16", 1, DEPTH // 2), *given], y)
    with pytest.raises(Exception, match="weight_scale has the wrong shape"):
        run(one, [random(1, "float16", 1, DEPTH), given[0], given[1].reshape(-1, 1), given[2]], y)
    with pytest.raises(Exception, match="format must be 0"):
        session(QUANT_LINEAR, "float16", format=3)
