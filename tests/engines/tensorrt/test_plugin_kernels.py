"""The attention plug-in's kernels as TensorRT would launch them, against the float64 reference, on a CUDA device.

Nothing of TensorRT runs here: PTX that was compiled ahead of time, loaded by the driver, gets pointers of the inputs,
the integers that the plug-in declares, and pointers of the outputs, with the grid, threads and shared memory that it
declares. Output and input of one address are one buffer, as TensorRT keeps them.
"""

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from plugins.abi import abi_hash
from plugins.paged_attention.reference import Attributes, Inputs
from plugins.paged_attention.schema import INPUTS
from plugins.paged_attention.tensorrt_plugin import LAYERS, SCRATCH, Fields, Kernels, Numbers
from tests.plugins.conftest import Case, Sequence
from tests.plugins.cuda_operands import after, check_caches, check_output, expected_output, of_type, on_device
from tests.plugins.cuda_tensors import torch
from tests.plugins.test_cuda_attention import CASE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
_SHARED_BYTES = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""


class Module:
    """Kernels of one PTX text, launched through the driver."""

    def __init__(self, ptx: str) -> None:
        torch.zeros(1, device="cuda")  # makes the context current
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(self._module), ctypes.c_char_p(ptx.encode()))

    def launch(self, name: str, grid: int, threads: int, shared_bytes: int, arguments: list) -> None:
        function = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(function), self._module, ctypes.c_char_p(name.encode()))
        self._call("cuFuncSetAttribute", function, _SHARED_BYTES, shared_bytes)
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._call("cuLaunchKernel", function, grid, 1, 1, threads, 1, 1, shared_bytes, stream, addresses, None)

    def _call(self, name: str, *arguments: object) -> None:
        error = getattr(self._driver, name)(*arguments)
        assert error == 0, f"{name} gave CUDA error {error}"


def run(module: Module, kernels: Kernels, fields: Fields, tensors: dict) -> torch.Tensor:
    """All layers one after the other over one set of buffers; gives the attention's output."""
    for layer in LAYERS:
        shapes = {name: tuple(tensors[name].shape) for name in layer.inputs}
        launch = layer.launch(kernels, fields, shapes, Numbers())
        arguments = [ctypes.c_void_p(tensors[name].data_ptr()) for name in layer.inputs]
        arguments += [ctypes.c_int32(integer) for integer in launch.integers]
        for name in layer.outputs:
            if name not in layer.inputs:
                tensors[name] = torch.full_like(tensors[layer.like], float("nan"))
        arguments += [ctypes.c_void_p(tensors[name].data_ptr()) for name in layer.outputs]
        module.launch(layer.kernel, launch.grid, launch.threads, launch.shared_bytes, arguments)
    return tensors["output"]


def fields_of(attributes: Attributes) -> Fields:
    a = attributes
    return Fields(
        *(a.num_heads, a.kv_num_heads, a.scale, a.softcap, a.local_window_size, a.do_rotary, a.rotary_interleaved),
        abi_hash(),
    )


def check(case: Case, dtype: str) -> None:
    """As `tests.plugins.cuda_operands.check`, of the kernels that are launched alone."""
    inputs: Inputs = of_type(case, dtype)
    operands = on_device(inputs)
    major, minor = torch.cuda.get_device_capability()
    a, processors = case.attributes, torch.cuda.get_device_properties(0).multi_processor_count
    group, seqs = a.num_heads // a.kv_num_heads, len(case.sequences)
    kernels = Kernels(dtype, case.head_dim, f"sm_{major}{minor}", group, a.kv_num_heads, processors, seqs)
    given = {spec.name: getattr(operands, spec.name, None) for spec in INPUTS}
    nothing = torch.zeros((1, 2), device="cuda")  # as the graph has it where nothing is rotated
    tensors = {name: nothing if tensor is None else tensor for name, tensor in given.items()}
    tensors[SCRATCH] = torch.zeros(kernels.scratch, dtype=torch.int32, device="cuda")
    output = run(Module(kernels.ptx()), kernels, fields_of(case.attributes), tensors)
    torch.cuda.synchronize()
    assert not tensors[SCRATCH][: kernels.counters].any(), "counters are left as they were found"
    check_caches(inputs, operands, case.attributes)
    check_output(output, expected_output(after(inputs, operands), case.attributes, dtype), dtype)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_head_size(dtype: str, head_dim: int) -> None:
    check(replace(CASE, head_dim=head_dim, rotary_dim=head_dim), dtype)


@pytest.mark.parametrize(
    ("heads", "block_size", "window", "softcap", "rotary_dim", "interleaved", "do_rotary"),
    [
        ((4, 4), 32, -1, 0.0, 128, 0, 1),
        ((14, 2), 64, 33, 0.0, 64, 1, 1),
        ((24, 2), 128, 5, 2.0, 32, 0, 1),
        ((16, 1), 16, 200, 30.0, 128, 0, 1),
        ((5, 1), 16, 1, 0.0, 128, 1, 0),
    ],
)
def test_options(heads, block_size, window, softcap, rotary_dim, interleaved, do_rotary) -> None:
    attributes = Attributes(*heads, 0.0, softcap, window, do_rotary, interleaved)
    case = replace(CASE, attributes=attributes, block_size=block_size, rotary_dim=rotary_dim, seed=block_size)
    check(case, "float16")


@pytest.mark.parametrize("seed", range(8))
def test_decode_steps_of_many_sequences(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = tuple(Sequence(1, int(past)) for past in rng.integers(0, 2000, int(rng.integers(1, 33))))
    attributes = Attributes(num_heads=9, kv_num_heads=3, do_rotary=1)
    check(replace(CASE, seed=seed, sequences=sequences, attributes=attributes, head_dim=64, rotary_dim=64), "float16")
