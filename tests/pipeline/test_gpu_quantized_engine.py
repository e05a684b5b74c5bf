"""A quantised decoder on a CUDA device: its kernels against what its graph gives on the CPU.

pytest -m gpu tests/pipeline/test_gpu_quantized_engine.py
"""

from pathlib import Path

import onnxruntime as ort
import pytest

from engines.backends.cuda_decoder import CudaDecoder
from engines.bundle import EngineBundle
from engines.runtime.engine import Engine
from engines.runtime.request import SamplingParams
from engines.runtime.scheduler import SchedulerConfig
from engines.sku import sku_table
from engines.sku_detect import match_gpu, own_gpus
from passes.onnx_model import onnx_model_from_path
from pipeline.build import build
from pipeline.config import BuildConfig
from pipeline.cpu_form import write_cpu_form
from pipeline.expected import expected_from_graph
from pipeline.progress import Progress
from pipeline.quantize.config import QuantizeConfig
from pipeline.tune.derive import derive_bundle
from plugins.build import cpu_library
from tests.pipeline.quantize_material import FEW, LOOSE

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("CUDAExecutionProvider" not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
]

TOLERANCES = {"w8a8-dynamic": 5e-2, "fp8": 0.15, "w4a16": 5e-2}
"""By scheme, of max|logits - expected| / max|expected|. bfloat16's last bit decides how W8A8 rounds a row, and its
rounding alone makes 0.03 with int8 and 0.1 with fp8 (on the CPU, against the same weights with rows as they are)."""
SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512}


@pytest.fixture(scope="module", params=[("int8", ""), ("fp8", "int8-kv"), ("int4", "int8-k")], ids=str)
def bundle(request: pytest.FixtureRequest, make_llama, tmp_path_factory, silent: Progress) -> EngineBundle:
    """All layers quantised. Random weights tell the gate nothing, so that its limits are wide."""
    quant, kv = request.param
    sku = match_gpu(own_gpus()[0], sku_table()).sku
    if quant == "fp8" and "fp8" not in sku.precisions:
        pytest.skip("this device has no products of float8")
    folder: Path = tmp_path_factory.mktemp("quantised")
    (folder / "limits.toml").write_text(LOOSE)
    options = {"search": "all", "keep_ends": False, "generate": 8, "calibration": FEW, "limits": folder / "limits.toml"}
    quantize = QuantizeConfig(quant, kv=kv, **options)
    config = BuildConfig(out=folder / "b", precision="bf16", verify_passes=False, quantize=quantize)
    return build(str(make_llama(spread=0.06, **SIZES)), [sku.name], config, silent)[0].bundle


def test_logits_are_those_of_its_graph(bundle: EngineBundle, tmp_path: Path, tmp_path_factory) -> None:
    """Prompts, whose rows W8A8 quantises, and captured steps, whose rows the kernels take as they are.

    As it was built, and with all by W8A8, and all by the kernels: each has logits of its own.
    """
    manifest = bundle.manifest
    counts = {scheme: count for scheme, count in manifest.quantization.schemes.items() if scheme != "float"}
    assert sum(counts.values()) == 9
    (tolerance,) = {TOLERANCES[scheme] for scheme, count in counts.items() if count}
    variants = [bundle, *(derive_bundle(bundle, tmp_path / str(rows), kernel_rows=rows) for rows in (0, 64))]
    for variant in variants:
        form = write_cpu_form(variant.engine_path, tmp_path_factory.mktemp("form"))
        expected = expected_from_graph(form, onnx_model_from_path(variant.engine_path), [cpu_library()])
        config = SchedulerConfig(max_running=len(expected.texts), tokens_per_step=512)
        with Engine.open(variant.path, kv_blocks=64, config=config) as engine:
            assert isinstance(engine.backend, CudaDecoder)
            assert expected.worst_error(engine.backend, manifest.decoder) < tolerance


def test_answers_end_and_every_block_comes_home(bundle: EngineBundle) -> None:
    prompts = [list(range(1, length)) for length in (2, 30, 90, 45)]
    with Engine.open(bundle.path, kv_blocks=64, config=SchedulerConfig(max_running=4)) as engine:
        answers = engine.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
        assert [len(answer.token_ids) for answer in answers] == [20] * 4
        assert engine.free_blocks == 64
