"""The whole engine on a CUDA device: its logits against torch's, its greedy tokens against the CPU's.

    pytest -m gpu tests/engines/test_gpu_engine.py

The tests of logits also run on this machine's CPU, with a bundle for it; the rest is skipped without a device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from engines.runtime.engine import Engine
from engines.runtime.request import Request, SamplingParams
from engines.runtime.scheduler import SchedulerConfig
from engines.runtime.score import score
from engines.sku import sku_table
from engines.sku_detect import match_gpu, own_gpus
from pipeline.build import build
from pipeline.config import BuildConfig
from pipeline.progress import Progress
from plugins.errors import KilnError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCABULARY = 512
gpu = (
    pytest.mark.gpu,
    pytest.mark.skipif("CUDAExecutionProvider" not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
)


@dataclass(frozen=True)
class Kind:
    """A build, and how large max|logits - torch's| / max|torch's| may be, with rounding in cache and products."""

    sku: str
    precision: str
    tolerance: float


CPU = Kind("cpu", "fp32", 1e-4)
FP16, BF16 = Kind("gpu", "fp16", 1e-2), Kind("gpu", "bf16", 5e-2)
KINDS = [CPU, *(pytest.param(kind, id=f"gpu-{kind.precision}", marks=gpu) for kind in (FP16, BF16))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose likely tokens are far apart, so that rounding rarely makes another one greedy."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    folder = tmp_path_factory.mktemp("model") / "llama"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reference(model: Path) -> Callable[[list[int]], NDArray]:
    """torch's logits of every token of a text, in FP32."""
    network = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def logits(token_ids: list[int]) -> NDArray:
        with torch.inference_mode():
            return network(torch.tensor([token_ids]), use_cache=False).logits[0].numpy()

    return logits


@pytest.fixture(scope="module")
def open_engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    """Engines by kind, each of a bundle that is built once."""
    bundles: dict[Kind, Path] = {}
    engines = []

    def open_(kind: Kind, **options) -> Engine:
        if kind not in bundles:
            path = tmp_path_factory.mktemp("bundles") / kind.precision
            sku = kind.sku if kind.sku == "cpu" else match_gpu(own_gpus()[0], sku_table()).sku.name
            config = BuildConfig(out=path, precision=kind.precision, verify_passes=False)
            build(str(model), [sku], config, Progress())
            bundles[kind] = path
        engines.append(Engine.open(bundles[kind], **options))
        return engines[-1]

    yield open_
    for engine in engines:
        engine.close()


CONFIG = SchedulerConfig(max_running=12, tokens_per_step=96)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_a_given_text_are_those_of_torch(kind: Kind, open_engine, reference):
    """Computed at once, in pieces, and token by token, which on a GPU is by captured graphs."""
    text = np.random.default_rng(1).integers(0, VOCABULARY, 150).tolist()
    expected = reference(text)
    engine = open_engine(kind, kv_blocks=64, config=CONFIG)
    for chunk in (150, 37, 1):
        found = np.concatenate(list(score(engine.backend, text, chunk)))
        assert np.abs(found - expected).max() < kind.tolerance * np.abs(expected).max(), f"in pieces of {chunk}"


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_likeliest_by_torch_up_to_rounding(kind: Kind, open_engine, reference):
    """Of eleven prompts at once, which is between two captured batch sizes, some longer than a step holds."""
    generator = np.random.default_rng(2)
    prompts = [
        generator.integers(0, VOCABULARY, length).tolist() for length in (3, 150, 17, 64, 1, 96, 200, 33, 5, 40, 2)
    ]
    engine = open_engine(kind, kv_blocks=256, config=CONFIG)
    answers = engine.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    for prompt, answer in zip(prompts, answers, strict=True):
        text = [*prompt, *answer.token_ids]
        rows = reference(text)[len(prompt) - 1 : -1]
        chosen = rows[np.arange(20), list(answer.token_ids)]
        assert (rows.max(axis=1) - chosen <= 2 * kind.tolerance * np.abs(rows).max()).all()
    assert engine.free_blocks == 256


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_drawn_by_seed(kind: Kind, open_engine):
    engine = open_engine(kind, kv_blocks=64, config=CONFIG)
    drawn = [
        engine.generate([Request((5, 6, 7), SamplingParams(temperature=1.0, top_p=0.9, seed=seed, max_tokens=30))])
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


@gpu[0]
@gpu[1]
def test_greedy_tokens_are_those_of_the_cpu_in_fp32(open_engine, reference):
    """Where one leads by more than rounding: attention on a GPU is of 16 bits, so no engine there is FP32."""
    prompts = [np.random.default_rng(seed).integers(0, VOCABULARY, 10 + 9 * seed).tolist() for seed in range(8)]
    options = {"kv_blocks": 128, "config": CONFIG}
    answers = open_engine(CPU, **options).generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    backend = open_engine(FP16, **options).backend
    compared = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        text, answered = [*prompt, *answer.token_ids], slice(len(prompt) - 1, -1)
        rows = reference(text)[answered]
        second, first = np.sort(rows, axis=1)[:, -2:].T
        leads = first - second > 2 * FP16.tolerance * np.abs(rows).max()
        found = np.concatenate(list(score(backend, text, 1)))[answered].argmax(axis=1)
        assert (found == answer.token_ids)[leads].all()
        compared += leads.sum()
    assert compared > 100


@gpu[0]
@gpu[1]
def test_a_cache_that_the_device_cannot_hold_is_refused_and_leaves_nothing(open_engine):
    from plugins.cuda_runtime import CudaRuntime

    runtime = CudaRuntime()
    open_engine(BF16, kv_blocks=64).close()
    before = runtime.memory()[0]
    for _ in range(3):
        with pytest.raises(KilnError, match="lower kv_blocks"):
            open_engine(BF16, kv_blocks=10**9)
        with open_engine(BF16, kv_blocks=64) as engine:
            assert len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
    assert before - runtime.memory()[0] < 4 << 20


@pytest.mark.parametrize("kind", [pytest.param(BF16, marks=gpu)])
def test_steps_are_queued_without_waiting_for_the_device(kind: Kind, open_engine):
    """A copy to memory that is not pinned would wait for all that was queued before."""
    from torch.profiler import ProfilerActivity, profile

    engine, sampling = open_engine(kind, kv_blocks=64, config=CONFIG), SamplingParams(max_tokens=3, ignore_eos=True)
    engine.generate([[1, 2, 3]], sampling)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        engine.generate([list(range(1, 100)), [5, 6]], sampling)
    copies = [event.key for event in seen.key_averages() if "Memcpy" in event.key]
    assert copies, "inputs went to the device and tokens came from there"
    assert not [name for name in copies if "Pageable" in name]
