"""Runs any of the library's operators by itself, as a model of one node."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import helper

from plugins.build import cpu_library
from plugins.spec import OperatorSpec

from .conftest import ONNX_TYPES, Operator

ISAS = {"plain": 1, "avx2": 2, "avx512": 3, "avx512vnni": 4}


def each_isa(request: pytest.FixtureRequest, operator: Operator) -> Iterator[str]:
    """Body of a fixture with `params=ISAS`."""
    if operator.use_isa(ISAS[request.param]) < 0:
        pytest.skip(f"this machine lacks {request.param}")
    yield request.param
    operator.use_isa(0)


@functools.cache
def session(
    spec: OperatorSpec,
    inputs: int,
    outputs: int,
    threads: int = 2,
    library: str = "",
    absent: tuple[str, ...] = (),
    **attributes: Any,
) -> ort.InferenceSession:
    """The operator with its first `inputs` and `outputs`, the inputs without those named `absent`."""
    made = spec.outputs[:outputs]
    given = [one for one in spec.inputs[:inputs] if one.name not in absent]
    names = ["" if one.name in absent else one.name for one in spec.inputs[:inputs]]
    node = helper.make_node(spec.op_type, names, [one.name for one in made], domain=spec.domain, **attributes)
    described = [
        [helper.make_tensor_value_info(one.name, ONNX_TYPES[one.dtypes[0]], None) for one in side]
        for side in (given, made)
    ]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(spec.domain, spec.since_version)]
    model = helper.make_model(helper.make_graph([node], "one_node", *described), opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.register_custom_ops_library(library or str(cpu_library()))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(
    spec: OperatorSpec, *inputs: NDArray | None, outputs: int | None = None, threads: int = 2, **attributes: Any
) -> list[NDArray]:
    """None stands for an optional input that is left out."""
    count = len(spec.outputs) if outputs is None else outputs
    given = dict(zip((one.name for one in spec.inputs), inputs, strict=False))
    absent = tuple(name for name, value in given.items() if value is None)
    feeds = {name: value for name, value in given.items() if value is not None}
    return session(spec, len(inputs), count, threads, absent=absent, **attributes).run(None, feeds)


def normal(seed: int, *shape: int, scale: float = 1.0) -> NDArray[np.float32]:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, np.float32)
