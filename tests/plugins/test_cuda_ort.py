"""Paged attention on CUDA through an onnxruntime-gpu session, bound to fixed addresses and in a CUDA graph."""

from dataclasses import fields, replace

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper

from plugins.paged_attention import reference, schema
from plugins.paged_attention.cuda_calls import Operands
from plugins.paged_attention.reference import Attributes

from .conftest import ONNX_TYPES, STATE, Case, Sequence
from .cuda_node import bind, cuda_session
from .cuda_operands import INT8_LIMITS, check_caches, check_output, of_type, on_device, poisoned
from .cuda_tensors import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif("CUDAExecutionProvider" not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
]

ATTRIBUTES = Attributes(num_heads=8, kv_num_heads=2)
CASE = Case(
    seed=3,
    sequences=(Sequence(1, 700), Sequence(150, 0), Sequence(3, 90)),
    attributes=ATTRIBUTES,
    head_dim=128,
    block_size=16,
    key_dtype="float16",
    value_dtype="float16",
    rotary_dim=128,
)


def state(int8: str) -> dict[str, str]:
    """Outputs that continue an input: caches, and the scales of those that are int8, k, v or kv."""
    return {name: source for name, source in STATE.items() if "scale" not in name or name[0] in int8}


@pytest.fixture(params=["float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


def session(dtype: str, attributes: Attributes, graph: bool = False, int8: str = "") -> ort.InferenceSession:
    left_out = {"cos_cache", "sin_cache", "k_scale", "v_scale"} - set(state(int8).values())
    given = [spec for spec in schema.INPUTS if spec.name not in left_out]
    names = [spec.name if spec in given else "" for spec in schema.INPUTS]
    types = {spec.name: "int32" if spec.dtypes == ("int32",) else dtype for spec in given}
    types |= {"key_cache" if cache == "k" else "value_cache": "int8" for cache in int8}
    types |= {f"{cache}_scale": "float32" for cache in int8}
    outputs = {"output": dtype} | {name: types[source] for name, source in state(int8).items()}
    made = [spec.name if spec.name in outputs else "" for spec in schema.OUTPUTS]
    values = {field.name: getattr(attributes, field.name) for field in fields(attributes)}
    node = helper.make_node(schema.OP_TYPE, names, made, domain=schema.DOMAIN, **values)
    described = [
        [helper.make_tensor_value_info(name, ONNX_TYPES[one], None) for name, one in side.items()]
        for side in (types, outputs)
    ]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(schema.DOMAIN, schema.SINCE_VERSION)]
    model = helper.make_model(helper.make_graph([node], "one_node", *described), opset_imports=opsets, ir_version=10)
    return cuda_session(model, graph)


def bound(
    one: ort.InferenceSession, operands: Operands, output: "torch.Tensor", in_place: bool, int8: str = ""
) -> ort.IOBinding:
    binding = one.io_binding()
    for node in one.get_inputs():
        bind(binding.bind_input, node.name, getattr(operands, node.name))
    bind(binding.bind_output, "output", output)
    for name, source in state(int8).items():
        if in_place:
            bind(binding.bind_output, name, getattr(operands, source))
        else:
            binding.bind_output(name, "cuda")
    return binding


@pytest.mark.parametrize("int8", ["", "k", "kv"])
@pytest.mark.parametrize("in_place", [True, False])
def test_session_equals_reference(dtype: str, in_place: bool, int8: str) -> None:
    inputs = of_type(CASE, dtype, int8)
    operands = on_device(inputs, dtype=dtype)
    output = poisoned(operands, ATTRIBUTES)
    one = session(dtype, ATTRIBUTES, int8=int8)
    one.run_with_iobinding(bound(one, operands, output, in_place, int8))
    limit = INT8_LIMITS[dtype] if int8 else None
    check_output(output, reference.paged_attention(inputs, ATTRIBUTES)[0], dtype, limit)
    if in_place:
        check_caches(inputs, operands, ATTRIBUTES)
    else:
        fresh = on_device(inputs, dtype=dtype)
        assert torch.equal(operands.key_cache.view(torch.int8), fresh.key_cache.view(torch.int8)), "inputs stay"


def test_cuda_graph_follows_new_inputs(dtype: str) -> None:
    """The third run replays what the second captured, over buffers with other lengths."""
    case = replace(CASE, sequences=(Sequence(1, 500), Sequence(1, 3), Sequence(1, 90)))
    operands = on_device(of_type(case, dtype))
    output = poisoned(operands, ATTRIBUTES)
    one = session(dtype, ATTRIBUTES, graph=True)
    binding = bound(one, operands, output, in_place=True)
    for _ in range(2):
        one.run_with_iobinding(binding)
    inputs = of_type(replace(case, seed=8), dtype)
    inputs = replace(inputs, past_seqlens=np.array([450, 2, 81], np.int32))
    table, past = inputs.block_table, inputs.past_seqlens
    slots = np.array([table[seq, p // 16] * 16 + p % 16 for seq, p in enumerate(past)], np.int32)
    inputs = replace(inputs, slot_mapping=slots)
    fresh = on_device(inputs)
    for name in ("query", "key", "value", "key_cache", "value_cache", "past_seqlens", "block_table", "slot_mapping"):
        getattr(operands, name).copy_(getattr(fresh, name))
    output.fill_(float("nan"))
    torch.cuda.synchronize()
    one.run_with_iobinding(binding)
    check_output(output, reference.paged_attention(inputs, ATTRIBUTES)[0], dtype)


def test_errors_name_what_is_wrong() -> None:
    operands = on_device(of_type(replace(CASE, block_size=8), "float16"))
    one = session("float16", ATTRIBUTES)
    with pytest.raises(Exception, match="block size does not suit the CUDA kernels: expected a multiple of 16"):
        one.run_with_iobinding(bound(one, operands, poisoned(operands, ATTRIBUTES), in_place=True))
    short = replace(operands, past_seqlens=operands.past_seqlens[:2])
    with pytest.raises(Exception, match=r"cumulative_sequence_length has the wrong shape"):
        one.run_with_iobinding(bound(one, short, poisoned(operands, ATTRIBUTES), in_place=True))
