"""A bundle with an INT8 cache and bfloat16 attention, built, served and derived from as any other."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines.bundle import EngineBundle, open_bundle
from engines.runtime.engine import Engine
from engines.runtime.request import SamplingParams
from engines.runtime.scheduler import SchedulerConfig
from passes.standard import PassSwitches
from pipeline.build import build
from pipeline.config import BuildConfig
from pipeline.export import export_model
from pipeline.load import load
from pipeline.progress import Progress
from pipeline.source import resolve_source
from pipeline.tune.derive import derive_bundle
from plugins.errors import KilnError

LIMIT = 96
SWITCHES = PassSwitches(
    enable=("quantize_cache", "attention_precision"), options={"quantize_cache": {"max_context": LIMIT}}
)


@pytest.fixture(scope="module")
def bundle(tiny_llama_folder: Path, silent: Progress, tmp_path_factory: pytest.TempPathFactory) -> EngineBundle:
    config = BuildConfig(out=tmp_path_factory.mktemp("int8") / "tiny", passes=SWITCHES)
    return build(str(tiny_llama_folder), ["cpu"], config, silent)[0].bundle


def answers(path: Path) -> list[tuple[int, ...]]:
    prompts = [np.random.default_rng(length).integers(1, 120, length).tolist() for length in (1, 7, 33, 70)]
    with Engine.open(path, threads=1, config=SchedulerConfig(max_running=4)) as engine:
        return [c.token_ids for c in engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))]


def test_the_bundle_says_what_its_cache_is(bundle: EngineBundle, tiny_llama_bundle: EngineBundle) -> None:
    decoder, exact = bundle.manifest.decoder, tiny_llama_bundle.manifest.decoder
    assert decoder is not None
    assert exact is not None
    assert decoder == replace(exact, kv=replace(exact.kv, dtype="int8"), max_context=LIMIT)
    assert decoder.kv.bytes_per_token == 2 * 2 * 2 * (16 + 4)  # layers, keys and values, KV heads, numbers and scale
    done = {record.name: record for record in bundle.manifest.passes}
    assert done["quantize_cache"].rewrites == 8
    assert done["attention_precision"].rewrites == 2
    assert not done["quantize_cache"].rolled_back


def test_a_request_beyond_the_limit_is_refused(bundle: EngineBundle) -> None:
    with (
        Engine.open(bundle.path, threads=1) as engine,
        pytest.raises(KilnError, match=f"the prompt has {LIMIT} tokens, the engine holds {LIMIT}"),
    ):
        engine.generate([[5] * LIMIT], SamplingParams(max_tokens=1))


def test_blocks_of_another_size_give_the_same_tokens(bundle: EngineBundle, tmp_path: Path) -> None:
    derived = derive_bundle(open_bundle(bundle.path), tmp_path / "b", block_size=8)
    assert answers(derived.path) == answers(bundle.path)


def test_a_graph_with_a_float_cache_is_its_reference(
    tiny_llama_folder: Path, bundle: EngineBundle, silent: Progress, tmp_path: Path
) -> None:
    """Built from an .onnx file, the engine is compared with that file, each with its own cache."""
    export_model(load(resolve_source(str(tiny_llama_folder))), tmp_path / "m.onnx", BuildConfig())
    built = build(str(tmp_path / "m.onnx"), ["cpu"], BuildConfig(out=tmp_path / "b", passes=SWITCHES), silent)[0].bundle
    assert built.manifest.decoder == bundle.manifest.decoder
    check = next(check for check in built.manifest.checks if "unoptimised" in check.name)
    assert 1e-5 < check.value < 5e-2
