"""What tests of the batcher share: tiny real graphs without a KV cache, behind a gate that holds calls back."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx.parser

from engines.backends.onnxruntime import OnnxRuntimeModel
from engines.runtime.batch_queue import BatchingConfig
from engines.runtime.engine import Engine
from engines.runtime.info import EngineInfo

PATIENCE = 30
"""Seconds after which a test gives up."""

ENCODER = """(int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
    => (float[batch, sequence] hidden, float[batch] pooled) {
    axes = Constant<value_ints = [1]> ()
    ids = Cast<to = 1>(input_ids)
    mask = Cast<to = 1>(attention_mask)
    kept = Mul(ids, mask)
    total = ReduceSum<keepdims = 1>(kept, axes)
    number = ReduceSum<keepdims = 1>(mask, axes)
    mean = Div(total, number)
    hidden = Mul(ids, mean)
    pooled = Squeeze(mean, axes)
}"""
"""`pooled` is the mean of the ids that the mask keeps, `hidden` every id times that."""

IGNORES_MASK = ENCODER.replace("kept = Mul(ids, mask)", "kept = Identity(ids)").replace(
    "number = ReduceSum<keepdims = 1>(mask, axes)",
    "ones = Cast<to = 1>(attention_mask) one = Div(ids, ids) number = ReduceSum<keepdims = 1>(one, axes)",
)

MIXES_ROWS = """(float[n, 2] x) => (float[n, 2] y) {
    axes = Constant<value_ints = [0]> ()
    mean = ReduceMean<keepdims = 1>(x, axes)
    y = Sub(x, mean)
}"""

LOOKUP = """(int64[n, words] ids) => (float[n, words] found)
    <float[4] table = {0.5, 1.5, 2.5, 3.5}> { found = Gather(table, ids) }"""
"""Fails as a whole when one id is above 3."""

FIXED = "(float[1, 2] x) => (float[1, 2] y) { y = Add(x, x) }"


class Gated:
    """A backend that notes the rows of each call, and waits in each while the gate is closed."""

    def __init__(self, model: OnnxRuntimeModel) -> None:
        self.model = model
        self.inputs, self.outputs = model.inputs, model.outputs
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.rows: list[int] = []
        self.seen: list[np.ndarray] = []
        self.closed = False

    def check(self, inputs) -> None:
        self.model.check(inputs)

    def infer(self, inputs):
        first = next(iter(inputs.values()))
        self.rows.append(len(first))
        self.seen.append(first)
        self.entered.set()
        assert self.gate.wait(PATIENCE)
        return self.model.infer(inputs)

    def close(self) -> None:
        self.closed = True
        self.model.close()


class Served:
    """An engine over a gated model, and a way to have requests wait while another one runs."""

    def __init__(self, backend: Gated, config: BatchingConfig) -> None:
        self.backend = backend
        self.engine = Engine.from_model(backend, EngineInfo("tiny", "model"), config)

    def hold(self, inputs, **options) -> Future:
        """A request that runs, and does not end before the gate is opened."""
        self.backend.gate.clear()
        self.backend.entered.clear()
        future = self.engine.submit_infer(inputs, **options)
        assert self.backend.entered.wait(PATIENCE)
        return future

    def together(self, *requests) -> list:
        """Results of requests that wait while another one runs; the rows of their calls are all that is noted after."""
        first = self.hold(requests[0])
        futures = [self.engine.submit_infer(inputs) for inputs in requests]
        self.backend.rows.clear()
        self.backend.gate.set()
        first.result(PATIENCE)
        return [future.result(PATIENCE) for future in futures]

    def sample(self, name: str, **labels: str) -> float:
        return self.engine.metrics.registry.get_sample_value(f"kiln_{name}", {"model": "tiny", **labels}) or 0.0


@contextmanager
def gated_engines(folder: Path) -> Iterator[Callable[..., Served]]:
    """Opens engines over graphs in ONNX's textual syntax, and closes them in the end."""
    opened = []

    def make(graph: str, **config) -> Served:
        path = folder / f"{len(opened)}.onnx"
        onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> tiny {graph}'), path)
        served = Served(Gated(OnnxRuntimeModel(path, threads=1)), BatchingConfig(**config))
        opened.append(served)
        return served

    yield make
    for served in opened:
        served.backend.gate.set()
        served.engine.close()
        assert served.backend.closed


def text(*rows) -> dict:
    ids = np.array(rows, np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def x(*rows) -> dict:
    return {"x": np.array(rows, np.float32)}


def ids(*rows) -> dict:
    return {"ids": np.array(rows, np.int64)}


def assert_encoded(result, request) -> None:
    mean = request["input_ids"].mean(axis=1)
    np.testing.assert_allclose(result["pooled"], mean, rtol=1e-6)
    np.testing.assert_allclose(result["hidden"], request["input_ids"] * mean[:, None], rtol=1e-6)
