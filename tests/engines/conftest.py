"""Fixtures shared by the engine tests: a deterministic backend without a model, and a real tiny serving graph."""

import asyncio
import hashlib
import logging
import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines.backends.base import StepInputs
from engines.bundle import EngineBundle, write_bundle
from engines.manifest import Manifest, PluginRecord, TensorRecord
from engines.runtime.engine import Engine
from engines.runtime.request import Request
from engines.runtime.scheduler import SchedulerConfig
from engines.runtime.stream import Stream
from engines.server.served import LocalEngine
from passes.onnx_model import DecoderSpec, Tensor
from plugins.abi import abi_hash
from plugins.paged_attention.schema import KvLayer, KvSpec
from tests.manifests import manifest_of

from .tiny_model import TinyModel

EOS = 1


class FakeBackend:
    """The next token is a hash of every token that the cache holds for the sequence, read through its block table.

    So a wrong slot, block, position or length changes the tokens. `gate` holds steps back; `fail_steps` make them fail.
    """

    def __init__(self, num_blocks: int = 64, block_size: int = 4, vocabulary: int = 97, host_blocks: int = 0) -> None:
        self.kv = KvSpec((KvLayer(1, 1),), block_size, "float32")
        self.num_blocks = num_blocks
        self.vocabulary = vocabulary
        self.host_blocks = host_blocks
        self.cache = np.full((num_blocks + host_blocks) * block_size, -1, np.int64)
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

    def move_blocks(self, moves) -> None:
        blocks = self.cache.reshape(-1, self.kv.block_size)
        for source, target in moves:
            blocks[target] = blocks[source]

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="session")
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


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable]:
    """Opens an engine over a graph, behind a gate: `serve(graph, **batching)` gives a `gated_model.Served`."""
    from tests.engines.gated_model import gated_engines

    with gated_engines(tmp_path) as make:
        yield make


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyModel]:
    """Makes the tiny serving graph with a given cache dtype and context."""
    folder = tmp_path_factory.mktemp("tiny")

    def make(dtype: str = "float32", max_context: int = 256) -> TinyModel:
        return TinyModel(folder / f"{dtype}-{max_context}.onnx", dtype, max_context)

    return make


@pytest.fixture(scope="session")
def sampling_graph(tiny_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's serving graph, which chooses its tokens itself."""
    import onnx

    from passes.bind_sampling import BindSampling
    from passes.graph import graph_from_path, proto_from_graph, tidy

    graph = graph_from_path(tiny_model().path)
    assert BindSampling().call(graph).changed
    tidy(graph)
    path = tmp_path_factory.mktemp("sampling") / "engine.onnx"
    onnx.save(proto_from_graph(graph), path)
    return path


@pytest.fixture(scope="session")
def cpu_plugin() -> Path:
    """The compiled CPU plugin."""
    from plugins.build import cpu_library

    return cpu_library()


def tokenizer_folder(folder: Path) -> None:
    """Letters are tokens 1 to 60, and 0 ends a sequence, to match the tiny model's vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(ord("A") + i) for i in range(60)]
    core = Tokenizer(models.BPE({"<end>": 0, **{c: i for i, c in enumerate(letters, 1)}}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<end>"])
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(folder)


@pytest.fixture(scope="session")
def make_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., EngineBundle]:
    """Writes a bundle around a graph: with a decoder, a plugin that claims an ABI, and a tokenizer if asked for."""

    def make(
        graph: Path,
        decoder: DecoderSpec | None = None,
        plugin: Path | None = None,
        abi: str = abi_hash(),
        tokenizer: bool = False,
        outputs: Sequence[Tensor] = (),
    ) -> EngineBundle:
        def fill(folder: Path) -> Manifest:
            shutil.copy(graph, folder / "engine.onnx")
            if plugin:
                shutil.copy(plugin, folder / "plugin.so")
            if tokenizer:
                tokenizer_folder(folder / "tokenizer")
            operators = PluginRecord(file="plugin.so", operator="kiln::PagedAttention", abi_hash=abi)
            return manifest_of(
                folder,
                "tiny",
                tokenizer="tokenizer" if tokenizer else None,
                outputs=tuple(map(TensorRecord.of, outputs)),
                decoder=decoder,
                plugins=(operators,) if plugin else (),
            )

        return write_bundle(tmp_path_factory.mktemp("bundles") / "tiny", fill)

    return make


@pytest.fixture(scope="session")
def tiny_bundle(make_bundle, tiny_model, cpu_plugin) -> EngineBundle:
    """The tiny serving graph as a bundle, with a tokenizer of single letters."""
    model = tiny_model()
    return make_bundle(model.path, model.decoder, cpu_plugin, tokenizer=True)


@pytest.fixture(scope="session")
def twice_bundle(make_bundle, tmp_path_factory: pytest.TempPathFactory) -> EngineBundle:
    """A model without a cache: `twice` is `x + x`, both float32 [n]."""
    import onnx

    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["x", "x"], ["twice"])],
        "twice",
        [value("x", 1, ["n"])],
        [value("twice", 1, ["n"])],
    )
    path = tmp_path_factory.mktemp("twice") / "twice.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10), path)
    return make_bundle(path)


class RecordedEngine(LocalEngine):
    """Notes what the server asks for, and the streams that it gets for it."""

    def __init__(self, engine: Engine, tokenizer: Path | None = None) -> None:
        super().__init__(engine)
        if tokenizer is not None:
            self.info = replace(self.info, tokenizer=str(tokenizer))
        self.engine = engine
        self.submitted: queue.Queue[tuple[Request, list[Stream]]] = queue.Queue()

    async def submit(self, request: Request) -> list[Stream]:
        streams = self.engine.submit_choices(request)
        self.submitted.put((request, streams))
        return streams


@pytest.fixture(scope="session")
def recorded_engine() -> type[RecordedEngine]:
    return RecordedEngine


class Served:
    """A server on a thread: its `url`, its `server` and `context`, and its log `lines` as they come."""

    def __init__(self, engines, config=None, keys=None) -> None:
        from engines.server.config import ServerConfig
        from engines.server.serve import bind, server_for, url_of

        self.lines: queue.Queue[str] = queue.Queue()
        self._handler = logging.Handler()
        self._handler.emit = lambda record: self.lines.put(record.getMessage())
        self._log = logging.getLogger("kiln.server")
        self._log.addHandler(self._handler)
        self._log.setLevel(logging.INFO)
        ready = threading.Event()
        listener = bind("127.0.0.1", 0)
        self.url, self.port = url_of(listener), listener.getsockname()[1]
        self.server = server_for(engines, config or ServerConfig(), keys, on_ready=ready.set)
        self.context = self.server.context
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([listener])))
        self.thread.start()
        assert ready.wait(20)

    def end(self) -> None:
        """What a signal does."""
        self.server.handle_exit(15, None)

    def close(self) -> None:
        self.thread.join(20)
        self._log.removeHandler(self._handler)
        assert not self.thread.is_alive()


@contextmanager
def servers() -> Iterator[Callable[..., Served]]:
    running: list[Served] = []

    def make(engines, config=None, keys=None) -> Served:
        running.append(Served(engines, config, keys))
        return running[-1]

    yield make
    for server in (*running, *running):  # the second time, it does not wait for requests
        with suppress(RuntimeError):  # its loop has ended
            server.end()
    for server in running:
        server.close()


@pytest.fixture
def served() -> Iterator[Callable[..., Served]]:
    """Serves engines over HTTP: `served({name: engine}, config, keys)`."""
    with servers() as make:
        yield make


@pytest.fixture(scope="module")
def served_on() -> Iterator[Callable[..., Served]]:
    """As `served`, until the module's tests are done; the log lines of several such servers mix."""
    with servers() as make:
        yield make
