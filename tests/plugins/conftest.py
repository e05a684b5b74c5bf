"""Runs the paged-attention operator through a real onnxruntime session, and draws inputs for it."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import strategies as st
from onnx import TensorProto, helper

from plugins.build import cpu_library
from plugins.paged_attention import schema
from plugins.paged_attention.reference import Attributes, Inputs, quantized

STATE = {
    "key_cache_out": "key_cache",
    "value_cache_out": "value_cache",
    "k_scale_out": "k_scale",
    "v_scale_out": "v_scale",
}
"""Outputs that continue an input."""

ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
}
NUMPY_TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int8": np.int8}
ISAS = {"plain": 1, "avx2": 2, "avx512": 3, "avx512bf16": 5}


@dataclass(frozen=True)
class Sequence:
    """How many tokens are new and in the cache; `shared` of the past blocks are sequence 0's own first ones."""

    new: int
    past: int
    unwritten: int = 0  # the first so many new tokens have slot -1: their keys already stand in the cache


@dataclass(frozen=True)
class Case:
    """A whole call, reproducible from its fields."""

    seed: int
    sequences: tuple[Sequence, ...]
    attributes: Attributes
    head_dim: int
    block_size: int
    key_dtype: str
    value_dtype: str
    rotary_dim: int
    shared_blocks: int = 0

    def inputs(self) -> Inputs:
        """Random operands; every slot that no sequence has yet filled holds NaN, as do rows no one should read.

        Of an int8 cache the scales do.
        """
        rng = np.random.default_rng(self.seed)
        a, bs = self.attributes, self.block_size
        tokens = sum(s.new for s in self.sequences)
        widths = [-(-(s.new + s.past) // bs) for s in self.sequences]
        blocks = sum(widths) + 3
        order = rng.permutation(blocks)
        table = np.full((len(self.sequences), max(widths, default=0) + 2), -1, np.int32)  # -1: never to be read
        taken = 0
        for seq, width in enumerate(widths):
            table[seq, :width] = order[taken : taken + width]
            taken += width
            if seq:  # share whole blocks of both sequences' pasts
                shared = min(self.shared_blocks, self.sequences[0].past // bs, self.sequences[seq].past // bs)
                table[seq, :shared] = table[0, :shared]
        shape = (blocks, bs, a.kv_num_heads, self.head_dim)
        dtypes = (self.key_dtype, self.value_dtype)
        caches = [np.full(shape, 99 if d == "int8" else np.nan, NUMPY_TYPES[d]) for d in dtypes]
        scales = [np.full(shape[:3], np.nan, np.float32) if d == "int8" else None for d in dtypes]
        slots = []
        for seq, s in enumerate(self.sequences):
            positions = np.arange(s.past + s.new)
            flat = table[seq, positions // bs] * bs + positions % bs
            for cache, scale in zip(caches, scales, strict=True):
                filled = s.past + s.unwritten
                rows = rng.standard_normal((filled, *shape[2:])).astype(np.float32)
                if scale is not None:
                    rows, scale.reshape(-1, shape[2])[flat[:filled]] = quantized(rows)
                cache.reshape(-1, *shape[2:])[flat[:filled]] = rows
            slots.append(np.where(np.arange(s.new) < s.unwritten, -1, flat[s.past :]))
        angles = rng.uniform(0, 7, (max((s.past + s.new for s in self.sequences), default=0) + 1, self.rotary_dim // 2))
        rotary = bool(a.do_rotary)

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        return Inputs(
            query=normal(tokens, a.num_heads * self.head_dim),
            key=normal(tokens, a.kv_num_heads * self.head_dim),
            value=normal(tokens, a.kv_num_heads * self.head_dim),
            key_cache=caches[0],
            value_cache=caches[1],
            cumulative_sequence_length=np.cumsum([0, *(s.new for s in self.sequences)]).astype(np.int32),
            past_seqlens=np.array([s.past for s in self.sequences], np.int32),
            block_table=table,
            slot_mapping=np.concatenate([*slots, []]).astype(np.int32),
            cos_cache=np.cos(angles).astype(np.float32) if rotary else None,
            sin_cache=np.sin(angles).astype(np.float32) if rotary else None,
            k_scale=scales[0],
            v_scale=scales[1],
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Ragged batches of prompts, chunks, single tokens and empty sequences over every option of the operator."""
    kinds = {
        "decode": st.tuples(st.integers(1, 5), st.integers(0, 900)),
        "prompt": st.tuples(st.integers(1, 300), st.just(0)),
        "chunk": st.tuples(st.integers(2, 140), st.integers(0, 400)),
        "empty": st.tuples(st.just(0), st.integers(0, 50)),
    }
    shapes = draw(st.lists(st.sampled_from(sorted(kinds)).flatmap(kinds.__getitem__), min_size=1, max_size=5))
    sequences = tuple(Sequence(new, past, draw(st.sampled_from([0, 0, 0, min(new, 1), new]))) for new, past in shapes)
    head_dim = draw(st.one_of(st.sampled_from([32, 64, 80, 96, 128, 256]), st.integers(4, 32).map(lambda n: 8 * n)))
    if draw(st.integers(0, 9)) == 0:
        head_dim = draw(st.integers(1, 100))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    do_rotary = draw(st.booleans()) and head_dim > 1
    key_dtype = draw(st.sampled_from(sorted(NUMPY_TYPES)))
    return Case(
        seed=draw(st.integers(0, 2**32 - 1)),
        sequences=sequences,
        attributes=Attributes(
            num_heads=kv_heads * group,
            kv_num_heads=kv_heads,
            scale=draw(st.sampled_from([0.0, 0.05, 0.3])),
            softcap=draw(st.sampled_from([0.0, 0.0, 2.0, 30.0])),
            local_window_size=draw(st.sampled_from([-1, -1, 1, 5, 33, 200])),
            do_rotary=int(do_rotary),
            rotary_interleaved=draw(st.integers(0, 1)),
            compute_dtype=draw(st.sampled_from([0, 0, 1])),
        ),
        head_dim=head_dim,
        block_size=draw(st.sampled_from([1, 3, 8, 16, 16, 32, 100, 256])),
        key_dtype=key_dtype,
        value_dtype=draw(st.sampled_from([key_dtype, *NUMPY_TYPES])),
        rotary_dim=2 * draw(st.sampled_from([head_dim // 2, max(1, head_dim // 4)])),
        shared_blocks=draw(st.integers(0, 6)),
    )


class Operator:
    """The operator behind an onnxruntime session of one node."""

    def __init__(self, library: str) -> None:
        self.library = library
        self._dll = ctypes.CDLL(library)

    def use_isa(self, isa: int) -> int:
        """Forces an instruction set (0: the best); returns the one in use, -1 if this machine lacks it."""
        return int(self._dll.kiln_set_isa(isa))

    def session(
        self, inputs: Inputs, attributes: Attributes, threads: int = 2, leave_out: tuple[str, ...] = ()
    ) -> ort.InferenceSession:
        given = {spec.name: getattr(inputs, spec.name) for spec in schema.INPUTS}
        names = [name if array is not None else "" for name, array in given.items()]
        dtypes = {"output": "float32", **{name: str(array.dtype) for name, array in state_of(inputs).items()}}
        outputs = [spec.name if spec.name in dtypes else "" for spec in schema.OUTPUTS]
        values = {f.name: getattr(attributes, f.name) for f in fields(attributes) if f.name not in leave_out}
        node = helper.make_node(schema.OP_TYPE, names, outputs, domain=schema.DOMAIN, **values)
        graph = helper.make_graph(
            [node],
            "one_node",
            [
                helper.make_tensor_value_info(name, ONNX_TYPES[str(array.dtype)], None)
                for name, array in given.items()
                if array is not None
            ],
            [helper.make_tensor_value_info(name, ONNX_TYPES[dtype], None) for name, dtype in dtypes.items()],
        )
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(schema.DOMAIN, schema.SINCE_VERSION)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.register_custom_ops_library(self.library)
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def run(
        self, inputs: Inputs, attributes: Attributes, threads: int = 2, leave_out: tuple[str, ...] = ()
    ) -> tuple[np.ndarray, Inputs]:
        """A plain run, whose outputs are buffers of their own: the output, and the inputs with the caches after it."""
        session = self.session(inputs, attributes, threads, leave_out)
        feeds = {
            spec.name: ort_value(array) for spec in schema.INPUTS if (array := getattr(inputs, spec.name)) is not None
        }
        state = state_of(inputs)
        output, *after = session.run_with_ort_values(["output", *state], feeds)
        arrays = {
            STATE[name]: array_from(value, before.dtype)
            for (name, before), value in zip(state.items(), after, strict=True)
        }
        return array_from(output, np.dtype(np.float32)), replace(inputs, **arrays)

    def run_in_place(self, inputs: Inputs, attributes: Attributes, threads: int = 2) -> np.ndarray:
        """As the runtime does it: cache outputs are bound to the input buffers, which the call updates."""
        session = self.session(inputs, attributes, threads)
        binding = session.io_binding()
        output = np.full(inputs.query.shape, np.nan, np.float32)  # poison: every element must be written
        values = {"output": ort_value(output)}
        for spec in schema.INPUTS:
            if (array := getattr(inputs, spec.name)) is not None:
                values[spec.name] = ort_value(array)
                binding.bind_ortvalue_input(spec.name, values[spec.name])
        binding.bind_ortvalue_output("output", values["output"])
        for name in state_of(inputs):
            binding.bind_ortvalue_output(name, values[STATE[name]])
        session.run_with_iobinding(binding)
        return output


def state_of(inputs: Inputs) -> dict[str, np.ndarray]:
    """Caches and scales by the outputs that continue them."""
    found = {output: getattr(inputs, name) for output, name in STATE.items()}
    return {name: array for name, array in found.items() if array is not None}


def ort_value(array: np.ndarray) -> ort.OrtValue:
    """A view, no copy: the array must outlive it."""
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, ONNX_TYPES[str(array.dtype)])


def array_from(value: ort.OrtValue, dtype: np.dtype) -> np.ndarray:
    """A copy; `OrtValue.numpy` does not know bfloat16."""
    shape = tuple(value.shape())
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(ctypes.string_at(value.data_ptr(), size), dtype).reshape(shape).copy()


@pytest.fixture(scope="session")
def operator() -> Operator:
    return Operator(str(cpu_library()))


@pytest.fixture(params=sorted(ISAS))
def isa(request: pytest.FixtureRequest, operator: Operator) -> Iterator[str]:
    """Each instruction set of this machine in turn."""
    if operator.use_isa(ISAS[request.param]) < 0:
        pytest.skip(f"this machine lacks {request.param}")
    yield request.param
    operator.use_isa(0)
