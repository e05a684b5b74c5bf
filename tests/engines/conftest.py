"""Fixtures shared by the engine tests: a deterministic backend without a model, and a real tiny serving graph."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from engines.backends.base import StepInputs
from engines.runtime.engine import Engine
from engines.runtime.scheduler import SchedulerConfig
from passes.onnx_model import DecoderSpec
from plugins.paged_attention.schema import (
    DOMAIN,
    LOGITS,
    OP_TYPE,
    STEP_INPUTS,
    KvLayer,
    KvSpec,
    cache_names,
    cache_output_names,
)

EOS = 1


class FakeBackend:
    """The next token is a hash of every token that the cache holds for the sequence, read through its block table.

    So a wrong slot, block, position or length changes the tokens. `gate` holds steps back; `fail_steps` make them fail.
    """

    def __init__(self, num_blocks: int = 64, block_size: int = 4, vocabulary: int = 97) -> None:
        self.kv = KvSpec((KvLayer(1, 1),), block_size, "float32")
        self.num_blocks = num_blocks
        self.vocabulary = vocabulary
        self.cache = np.full(num_blocks * block_size, -1, np.int64)
        self.steps: list[StepInputs] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fail_steps: list[Exception] = []
        self.nan_rows = False
        self.force: dict[int, int] = {}  # history length -> next token
        self.closed = False

    def step(self, inputs: StepInputs) -> np.ndarray:
        assert self.gate.wait(20)
        assert not self.closed
        self.steps.append(inputs)
        if self.fail_steps:
            raise self.fail_steps.pop()
        self.cache[inputs.slot_mapping] = inputs.input_ids
        cumulative, size = inputs.cumulative_sequence_length, self.kv.block_size
        logits = np.zeros((len(inputs.logits_indices), self.vocabulary), np.float32)
        for row, token in enumerate(inputs.logits_indices):
            sequence = int(np.searchsorted(cumulative, token, side="right")) - 1
            length = int(inputs.past_seqlens[sequence] + token - cumulative[sequence]) + 1
            positions = np.arange(length)
            slots = inputs.block_table[sequence][positions // size] * size + positions % size
            history = self.cache[slots]
            assert inputs.position_ids[token] == length - 1
            assert (history >= 0).all(), "read a slot that nobody wrote"
            digest = hashlib.sha256(history.tobytes()).digest()
            generator = np.random.default_rng(int.from_bytes(digest[:8]))
            logits[row] = generator.normal(size=self.vocabulary)
            logits[row, EOS] = -10  # ends only where a test asks for it
            if length in self.force:
                logits[row, self.force[length]] = 100
            if self.nan_rows:
                logits[row, 3] = np.nan
        return logits

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fake_backend() -> Callable[..., FakeBackend]:
    return FakeBackend


@pytest.fixture
def fake_engine() -> Iterator[Callable[..., Engine]]:
    """Makes engines over a FakeBackend; `engine.backend` is the fake."""
    engines = []

    def make(max_context: int = 200, tokenizer=None, max_running: int = 4, tokens_per_step: int = 16, **backend):
        fake = FakeBackend(**backend)
        decoder = DecoderSpec(fake.kv, fake.vocabulary, max_context, (EOS,))
        engine = Engine.from_decoder(fake, decoder, tokenizer, SchedulerConfig(max_running, tokens_per_step))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine._worker.backend.gate.set()
        engine.close()


class TinyModel:
    """A serving graph on disk: token and position embedding, two attention layers with residuals, and a head."""

    vocabulary, heads, kv_heads, head_dim, max_context, block_size = 61, 4, 2, 32, 256, 8

    def __init__(self, path: Path, dtype: str = "float32") -> None:
        self.path = path
        self.kv = KvSpec((KvLayer(self.kv_heads, self.head_dim),) * 2, self.block_size, dtype)
        self.decoder = DecoderSpec(self.kv, self.vocabulary, self.max_context, (0,))
        rng = np.random.default_rng(7)
        hidden, width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.weights = {
            "embedding": rng.normal(size=(self.vocabulary, hidden)).astype(np.float32),
            "positions": rng.normal(size=(self.max_context, hidden)).astype(np.float32),
            "head": rng.normal(size=(hidden, self.vocabulary)).astype(np.float32),
        }
        for layer in range(2):
            for name, columns in (("q", hidden), ("k", width), ("v", width), ("o", hidden)):
                weight = rng.normal(size=(hidden, columns)) / np.sqrt(hidden)
                self.weights[f"{name}{layer}"] = weight.astype(np.float32)
        self._save(path, dtype)

    def _save(self, path: Path, dtype: str) -> None:
        import onnx
        from onnx import TensorProto, helper, numpy_helper

        cache_type = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
        node = helper.make_node
        nodes = [
            node("Gather", ["embedding", "input_ids"], ["tokens"]),
            node("Gather", ["positions", "position_ids"], ["places"]),
            node("Add", ["tokens", "places"], ["hidden0"]),
        ]
        inputs = [helper.make_tensor_value_info(n, TensorProto.INT32, s) for n, s in STEP_INPUTS.items()]
        outputs = [helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, ["rows", self.vocabulary])]
        for layer in range(2):
            nodes += [node("MatMul", [f"hidden{layer}", f"{x}{layer}"], [f"{x}_{layer}"]) for x in "qkv"]
            caches, aliases = cache_names(layer), cache_output_names(layer)
            shape = ["blocks", self.block_size, self.kv_heads, self.head_dim]
            inputs += [helper.make_tensor_value_info(name, cache_type[dtype], shape) for name in caches]
            outputs += [helper.make_tensor_value_info(name, cache_type[dtype], shape) for name in aliases]
            step = ["cumulative_sequence_length", "past_seqlens", "block_table", "", "", "slot_mapping"]
            nodes += [
                node(
                    OP_TYPE,
                    [f"q_{layer}", f"k_{layer}", f"v_{layer}", *caches, *step],
                    [f"attention{layer}", *aliases],
                    domain=DOMAIN,
                    num_heads=self.heads,
                    kv_num_heads=self.kv_heads,
                ),
                node("MatMul", [f"attention{layer}", f"o{layer}"], [f"projected{layer}"]),
                node("Add", [f"hidden{layer}", f"projected{layer}"], [f"hidden{layer + 1}"]),
            ]
        nodes += [
            node("Gather", ["hidden2", "logits_indices"], ["rows"]),
            node("MatMul", ["rows", "head"], [LOGITS]),
        ]
        initializers = [numpy_helper.from_array(weight, name) for name, weight in self.weights.items()]
        graph = helper.make_graph(nodes, "tiny", inputs, outputs, initializers)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)

    def logits(self, token_ids: list[int]) -> np.ndarray:
        """The same model in float64 NumPy without a cache: [tokens, vocabulary]."""
        weights = {name: weight.astype(np.float64) for name, weight in self.weights.items()}
        count, group = len(token_ids), self.heads // self.kv_heads
        hidden = weights["embedding"][token_ids] + weights["positions"][:count]
        mask = np.triu(np.full((count, count), -np.inf), 1)
        for layer in range(2):
            q = (hidden @ weights[f"q{layer}"]).reshape(count, self.heads, self.head_dim)
            k, v = (
                (hidden @ weights[f"{x}{layer}"]).reshape(count, self.kv_heads, self.head_dim).repeat(group, axis=1)
                for x in "kv"
            )
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(self.head_dim) + mask
            probabilities = np.exp(scores - scores.max(-1, keepdims=True))
            probabilities /= probabilities.sum(-1, keepdims=True)
            attention = np.einsum("hqk,khd->qhd", probabilities, v).reshape(count, -1)
            hidden = hidden + attention @ weights[f"o{layer}"]
        return hidden @ weights["head"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyModel]:
    """Makes the tiny serving graph with a given cache dtype."""
    folder = tmp_path_factory.mktemp("tiny")

    def make(dtype: str = "float32") -> TinyModel:
        return TinyModel(folder / f"{dtype}.onnx", dtype)

    return make


@pytest.fixture(scope="session")
def cpu_plugin() -> Path:
    """The compiled CPU plugin."""
    from plugins.build import cpu_library

    return cpu_library()
