"""The plug-in-free form of a decoder: equal to the operator step by step, behind the scheduler, and really built."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.backends.base import StepInputs
from engines.backends.tensorrt.build import build_plan
from engines.backends.tensorrt.linear_decoder import LinearCall, LinearDecoder, OrtLinearGraph
from engines.backends.tensorrt.linear_graph import linear_graph
from engines.backends.tensorrt.native_graph import native_graph
from engines.backends.tensorrt.options import TensorRtOptions
from engines.backends.tensorrt.profiles import ServingShapes, derive_profiles
from engines.runtime.engine import Engine
from engines.runtime.request import Request, SamplingParams
from engines.runtime.scheduler import SchedulerConfig
from passes.bind_attention import BindAttention
from passes.manager import run_passes
from passes.onnx_model import OnnxModel
from plugins.errors import KilnError
from plugins.paged_attention.schema import STEP_INPUTS, KvLayer, KvSpec

from .serving import CONTEXT, Shape, evaluated_steps, serving_graph

ROWS = 4
SHAPES = [
    Shape(),
    Shape(packed=True, window=6),
    Shape(rotary=0, scale=0.2),
    Shape(rotary=32, interleaved=1, packed=True),
]


@pytest.mark.parametrize(
    ("shape", "dtype", "limit"),
    [*((shape, "float32", 1e-5) for shape in SHAPES), (SHAPES[1], "float16", 2e-2)],
    ids=str,
)
def test_it_computes_what_the_operator_does(shape: Shape, dtype: str, limit: float, tmp_path: Path) -> None:
    model = serving_graph(tmp_path / "model.onnx", shape)
    made = linear_graph(model, tmp_path / "linear.onnx", dtype)
    assert made.decoder is not None
    kv = made.decoder.kv
    assert (kv.block_size, kv.dtype) == (CONTEXT, dtype)
    assert not {node.op_type for node in onnx.load(made.path).graph.node} & {"PagedAttention"}
    decoder = LinearDecoder(OrtLinearGraph(made.path, kv, ROWS), kv, ROWS)
    for expected, feeds in evaluated_steps(model, model.decoder.kv):
        step = StepInputs(**{name: feeds[name] for name in STEP_INPUTS})
        rows = replace(step, block_table=np.array([[3], [1]], np.int32))  # rows that others lie between
        found = decoder.step(rows)
        assert np.abs(found - expected).max() <= limit * np.abs(expected).max()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OnnxModel:
    return serving_graph(tmp_path_factory.mktemp("linear") / "model.onnx", Shape(packed=True))


def test_requests_get_the_tokens_that_the_paged_cache_gives(model: OnnxModel, tmp_path: Path) -> None:
    """Through the scheduler, with more requests than places, chunks of prompts and steps that mix."""
    from engines.backends.onnxruntime import OnnxRuntimeDecoder
    from plugins.build import cpu_library

    bound, _ = run_passes(model, tmp_path / "bound.onnx", [BindAttention()])
    linear = linear_graph(model, tmp_path / "linear.onnx")
    assert model.decoder is not None
    assert linear.decoder is not None
    kv = linear.decoder.kv
    backends = [
        (OnnxRuntimeDecoder(bound.path, model.decoder.kv, 32, plugins=[cpu_library()]), model.decoder),
        (LinearDecoder(OrtLinearGraph(linear.path, kv, ROWS), kv, ROWS), linear.decoder),
    ]
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 31, size).tolist() for size in (3, 40, 17, 9, 30, 1, 25)]
    answers = []
    for backend, decoder in backends:
        with Engine.from_decoder(backend, decoder, None, SchedulerConfig(ROWS, 16, headroom=0.0)) as engine:
            requests = [Request(p, SamplingParams(max_tokens=8 + i, temperature=0)) for i, p in enumerate(prompts)]
            streams = [engine.submit(request) for request in requests]
            answers.append([[token for chunk in stream for token in chunk.token_ids] for stream in streams])
    assert answers[0] == answers[1]
    assert all(answers[0])


class Recorded:
    """A graph that writes down its calls and answers with what a row holds."""

    vocab_size = 1

    def __init__(self) -> None:
        self.rows: list[list[int]] = [[] for _ in range(ROWS)]
        self.calls: list[LinearCall] = []

    def run(self, call: LinearCall) -> np.ndarray:
        self.calls.append(call)
        for number, (tokens, past) in enumerate(zip(call.input_ids.tolist(), call.past.tolist(), strict=True)):
            row = self.rows[call.first + number]
            assert past <= len(row), "a position in between was never written"
            row[past : past + len(tokens)] = tokens
        return np.zeros((len(call.rows), 1), np.float32)

    def move_row(self, source: int, target: int) -> None:
        self.rows[target] = list(self.rows[source])

    def close(self) -> None:
        pass


@given(st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(1, 5)), min_size=1, max_size=40), st.data())
@settings(max_examples=60, deadline=None)
def test_no_row_loses_what_it_holds(work: list[tuple[int, int]], data: st.DataObject) -> None:
    """Steps over any rows, with any number of tokens: rows that go along keep theirs."""
    graph, expected, token = Recorded(), [[] for _ in range(ROWS)], 0
    decoder = LinearDecoder(graph, KvSpec((KvLayer(1, 1),), CONTEXT, "float32"), ROWS)
    while work:
        taken = dict(work[: data.draw(st.integers(1, ROWS))])
        work = work[len(taken) :]
        taken = {row: count for row, count in taken.items() if len(expected[row]) + count <= CONTEXT}
        if not taken:
            continue
        rows, counts = list(taken), list(taken.values())
        past = [len(expected[row]) for row in rows]
        ids = list(range(token, token := token + sum(counts)))
        cumulative = np.cumsum([0, *counts]).astype(np.int32)
        for row, begin, end in zip(rows, cumulative, cumulative[1:], strict=False):
            expected[row] += ids[begin:end]
        decoder.step(
            StepInputs(
                np.array(ids, np.int32),
                np.zeros(len(ids), np.int32),
                cumulative[1:] - 1,
                cumulative,
                np.array(past, np.int32),
                np.array(rows, np.int32)[:, None],
                np.zeros(len(ids), np.int32),
            )
        )
        assert [row[: len(known)] for row, known in zip(graph.rows, expected, strict=True)] == expected
    assert all(call.seqs == 1 or call.input_ids.shape[1] == 1 for call in graph.calls)


def test_what_a_linear_cache_cannot_do_is_refused(model: OnnxModel, tmp_path: Path) -> None:
    decoder = LinearDecoder(Recorded(), KvSpec((KvLayer(1, 1),), CONTEXT, "float32"), ROWS)
    one = np.ones(1, np.int32)
    with pytest.raises(KilnError, match="a linear cache shares no blocks"):
        decoder.step(StepInputs(one, one, one, np.array([0, 1], np.int32), one, one[:, None], -one))
    with pytest.raises(KilnError, match="no serving graph"):
        linear_graph(replace(model, decoder=None), tmp_path / "linear.onnx")
    proto = onnx.load(model.path)
    for node in proto.graph.node:
        if node.op_type == "PagedAttention":
            node.attribute.append(onnx.helper.make_attribute("softcap", 30.0))
    onnx.save(proto, tmp_path / "capped.onnx")
    with pytest.raises(KilnError, match=r"softcap 30\), which TensorRT's attention layer does not: .*plugin"):
        linear_graph(replace(model, path=tmp_path / "capped.onnx"), tmp_path / "linear.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("window", [-1, 6])
def test_tensorrt_builds_it_with_profiles_for_decode_chunks_and_prompts(builder, window: int, tmp_path: Path) -> None:
    model = serving_graph(tmp_path / "model.onnx", Shape(window=window))
    made = linear_graph(model, tmp_path / "linear.onnx", "float16")
    profiles = derive_profiles(made.inputs, made.decoder, ServingShapes(max_running=8, tokens_per_step=16))
    assert [profile.name for profile in profiles] == ["decode", "chunk", "prompt"]
    folder = tmp_path / "plan"
    folder.mkdir()
    native = native_graph(made, tmp_path / "native.onnx")
    plan = build_plan(made, profiles, TensorRtOptions(), folder, parsed=native)
    fused = [layer for layer in plan.layers if "_mha_" in layer.name]
    assert len(fused) == 2 * len(profiles), "each layer's attention is one kernel, in every profile"
    assert all(layer.input_types[:1] == ("Half",) for layer in fused)
    if window < 0:
        assert all("Int32" in layer.input_types for layer in fused), "which knows how long each sequence is"


def test_lengths_reach_tensorrts_attention(model: OnnxModel, tmp_path: Path) -> None:
    """Its importer of Attention leaves them out, so that no node of that kind may stay without a mask."""
    made = linear_graph(model, tmp_path / "linear.onnx", "float16")
    nodes = onnx.load(native_graph(made, tmp_path / "native.onnx")).graph.node
    attentions = [node for node in nodes if node.op_type == "TRT_Attention"]
    assert len(attentions) == 2
    assert not [node for node in nodes if node.op_type == "Attention"]
    cast = {node.output[0]: node.input[0] for node in nodes if node.op_type == "Cast"}
    for node in attentions:
        assert cast[node.input[5]] == "linear/lengths"
        assert b"lower_right" in [attribute.s for attribute in node.attribute]
    with pytest.raises(KilnError, match="another folder"):
        native_graph(made, tmp_path.parent / "native.onnx")
