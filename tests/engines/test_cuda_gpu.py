"""The CUDA decoder on a GPU: logits against the model in float64, captured steps, blocks, memory. In 16 bits."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from engines.backends.cuda_decoder import CudaDecoder
from engines.backends.cuda_graphs import ladder_up_to
from engines.backends.cuda_launching import LaunchingCudaDecoder
from engines.backends.cuda_memory import PinnedMemory
from engines.backends.launching import samples
from engines.runtime.engine import Engine
from engines.runtime.request import Request, SamplingParams
from engines.runtime.scheduler import SchedulerConfig
from engines.sku import resolve_sku
from passes.onnx_model import DECODER_METADATA, onnx_model_from_path
from passes.standard import PassSwitches
from pipeline.expected import steps_of
from pipeline.optimize import OptimizeConfig, optimize
from pipeline.packed import logits_of_backend
from plugins.cuda_build import cuda_library
from plugins.cuda_runtime import CudaRuntime
from plugins.errors import KilnError

from .cuda_steps import ints, one_more, prompt
from .tiny_model import TinyModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("CUDAExecutionProvider" not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
]
LIMITS = {"fp16": 1e-2, "bf16": 6e-2}
BLOCKS = 64


class Model(TinyModel):
    """The tiny model with heads and blocks that the CUDA attention takes."""

    head_dim, block_size = 64, 16


@pytest.fixture(scope="module")
def arch() -> str:
    runtime = CudaRuntime()
    runtime.close()
    return runtime.arch


@pytest.fixture(scope="module", params=["fp16", "bf16", "fp16 that samples", "bf16 that samples"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def precision(kind: str) -> str:
    return kind.split()[0]


@pytest.fixture(scope="module")
def model(kind: str, precision: str, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Its `path` is the graph for CUDA, `kv` the cache of that."""
    folder = tmp_path_factory.mktemp("gpu")
    made = Model(folder / "float.onnx")
    proto = onnx.load(made.path)
    onnx.helper.set_model_props(proto, {DECODER_METADATA: made.decoder.to_json()})
    shape = ["tokens", made.heads * made.head_dim]
    for layer in range(2):  # as an exported model has them: nothing infers the types of Kiln's operators
        value = onnx.helper.make_tensor_value_info(f"attention{layer}", onnx.TensorProto.FLOAT, shape)
        proto.graph.value_info.append(value)
    onnx.save(proto, made.path)
    source = onnx_model_from_path(made.path)
    disable = () if "samples" in kind else ("bind_sampling",)
    config = OptimizeConfig(PassSwitches(disable=disable), precision=precision, verify=False)
    engine, _ = optimize(source, folder / "engine.onnx", resolve_sku("h200"), config)
    made.path, made.kv, made.decoder = engine.path, engine.decoder.kv, engine.decoder
    made.outputs = [tensor.name for tensor in engine.outputs]
    return made


@pytest.fixture
def decoder(model: Model, arch: str) -> Iterator[Callable[..., CudaDecoder]]:
    made = []

    def make(blocks: int | None = BLOCKS, **options) -> CudaDecoder:
        options = {"max_context": model.max_context, "plugins": [cuda_library([arch])], **options}
        opened = LaunchingCudaDecoder if samples(model.outputs) else CudaDecoder
        made.append(opened(model.path, model.kv, blocks, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def caches_of(backend: CudaDecoder) -> bytes:
    """What the caches hold now."""
    runtime, found = backend._runtime, b""
    for tensor in backend._session.tensors:
        size = backend.num_blocks * backend._session.block_bytes(tensor)
        memory = PinnedMemory(runtime, size, "a copy of the cache")
        runtime.copy(memory.address, backend.cache_addresses[tensor.name], size)
        runtime.synchronize()
        found += memory.bytes.tobytes()
        memory.close()
    return found


@pytest.mark.parametrize("ladder", [(), (1, 2, 4, 8)])
def test_logits_follow_the_model(decoder, model: Model, precision: str, ladder: tuple[int, ...]) -> None:
    """Prompts mixed with single tokens, and single tokens alone, in scattered blocks."""
    generator = np.random.default_rng(1)
    texts = [generator.integers(0, model.vocabulary, length) for length in (5, 37, 64, 130, 200)]
    steps = steps_of(texts)
    found = logits_of_backend(decoder(ladder=ladder), model.decoder, texts, steps)
    for text, rows in zip(texts, found, strict=True):
        expected = model.logits(list(text))
        assert np.abs(rows - expected).max() / np.abs(expected).max() < LIMITS[precision]


def test_padding_writes_nowhere(decoder, model: Model) -> None:
    backend = decoder(ladder=(8,))
    backend.step(prompt(list(range(1, 41)), [3, 0, 5], model.block_size))
    before = caches_of(backend)
    step = one_more([4], [40], [[3, 0, 5]], model.block_size)
    backend.step(replace(step, slot_mapping=ints(-1)))
    assert caches_of(backend) == before
    backend.step(step)
    assert caches_of(backend) != before


def test_engine_gives_the_same_tokens_with_and_without_captured_steps(decoder, model: Model) -> None:
    """Mixed batches, more requests than places, half of them cancelled in between."""
    config = SchedulerConfig(max_running=12, tokens_per_step=64)
    prompts = [np.random.default_rng(n).integers(1, 61, 3 + 7 * n).tolist() for n in range(24)]
    answers = []
    for ladder in ((), ladder_up_to(12)):
        with Engine.from_decoder(decoder(300, ladder=ladder), model.decoder, None, config) as engine:
            streams = [
                engine.submit(Request(tokens, SamplingParams(max_tokens=40, ignore_eos=True))) for tokens in prompts
            ]
            given_up = [
                engine.submit(Request(tokens, SamplingParams(max_tokens=70, ignore_eos=True))) for tokens in prompts
            ]
            for stream in given_up:
                stream.cancel()
            answers.append([tuple(stream.result().token_ids) for stream in streams])
            for stream in given_up:
                stream.result()
            kv = engine._require_worker().kv
            assert kv.free + kv.cached == kv.total
    same = sum(one == other for one, other in zip(*answers, strict=True))
    assert same >= len(prompts) - 1, "near ties may go either way: products of other sizes sum in another order"


def test_blocks_move_between_device_and_host(decoder, model: Model, precision: str) -> None:
    size, text = model.block_size, list(range(1, 30))
    backend = decoder(host_blocks=2, ladder=(1,))
    backend.step(prompt(text, [0, 1], size))
    backend.move_blocks([(0, BLOCKS), (1, BLOCKS + 1), (5, 0), (6, 1), (BLOCKS, 9), (BLOCKS + 1, 7)])
    found = backend.step(one_more([40], [29], [[9, 7]], size))[0]
    expected = model.logits([*text, 40])[-1]
    assert np.abs(found - expected).max() / np.abs(expected).max() < LIMITS[precision]


def test_a_step_without_rows_gives_none(decoder, model: Model) -> None:
    step = prompt([1, 2, 3], [0], model.block_size)
    assert decoder().step(replace(step, logits_indices=ints())).shape == (0, model.vocabulary)


def test_short_memory_says_how_much_there_is_and_leaves_nothing(decoder, model: Model) -> None:
    runtime = CudaRuntime()
    free, total = runtime.memory()
    with pytest.raises(KilnError, match=r"GiB free of .*lower kv_blocks"):
        decoder(2 * total // model.kv.bytes_per_block)
    assert runtime.memory()[0] >= free - (64 << 20), "what ONNX Runtime's own libraries keep"
    decoder().step(prompt([1, 2, 3], [0], model.block_size))
    runtime.close()


def test_automatic_cache_leaves_a_reserve(decoder, model: Model) -> None:
    backend = decoder(None, most_blocks=1 << 40)
    free, total = backend._runtime.memory()
    assert 0.08 * total < free < 0.12 * total


def test_closing_gives_memory_back(decoder, model: Model) -> None:
    runtime = CudaRuntime()  # takes a stream, for each of which the operators keep scratch memory
    decoder(ladder=(1, 8)).close()  # what libraries keep for good is there now
    free = runtime.memory()[0]
    for _ in range(3):
        decoder(BLOCKS, ladder=(1, 8)).close()
    assert runtime.memory()[0] >= free - (16 << 20)
    runtime.close()


def test_an_engine_file_without_its_operators_is_refused(model: Model, tmp_path: Path) -> None:
    opened = LaunchingCudaDecoder if samples(model.outputs) else CudaDecoder
    with pytest.raises(KilnError, match="custom operators"):
        opened(model.path, model.kv, 4, max_context=64)
