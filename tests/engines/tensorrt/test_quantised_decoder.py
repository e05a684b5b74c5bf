"""`kiln tensorrt build --quant int8` of a decoder, as a command: planned, judged here, built by a real builder.

A tiny Llama with random weights, in the plug-in-free form, so that a parser and builder take it without a GPU.
"""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from engines.backends.tensorrt.layers import layers_from_file
from engines.bundle import open_bundle
from passes.quantization.plan import plan_from_toml
from pipeline.cli import kiln_group
from pipeline.gate.report import GateFailedError
from pipeline.quantize.material import default_text
from tests.pipeline.conftest import make_llama  # noqa: F401 (a fixture)
from tests.pipeline.quantize_material import LOOSE

pytestmark = pytest.mark.slow
_CHARACTERS = 8000


@pytest.fixture(scope="module")
def llama(make_llama) -> Path:  # noqa: F811
    return make_llama(positions=64)


def command(model: Path, out: Path, limits: Path) -> list[str]:
    text = limits.with_suffix(".txt")
    text.write_text(default_text()[:_CHARACTERS], encoding="utf-8")
    build = ["tensorrt", "build", str(model), "--sku", "t4", "--quant", "int8", "--no-check", "--out", str(out)]
    sizes = ["--max-running", "2", "--tokens-per-step", "16", "--override-coverage"]
    sizes += ["--calibration", f"text:{text}", "--gate-text", str(text)]
    return [*build, *sizes, "--samples", "3", "--gate-limits", str(limits), "--gate-tokens", "8"]


def test_a_decoder_multiplies_in_8_bits_and_is_held_against_the_float_graph(builder, llama, tmp_path: Path) -> None:
    """What is not quantised is in FP16."""
    (tmp_path / "limits.toml").write_text(LOOSE)
    build = command(llama, tmp_path / "bundle", tmp_path / "limits.toml")
    done = CliRunner().invoke(kiln_group, [*build, "--precision", "fp16", "--keep", "*.1.mlp.down_proj"])
    assert done.exit_code == 0, done.output + str(done.exception)
    bundle = open_bundle(tmp_path / "bundle")
    record, manifest = bundle.manifest.quantization, bundle.manifest
    assert record is not None
    assert manifest.model.source == str(llama)
    assert manifest.tensorrt is not None
    plan = plan_from_toml(bundle.path / record.plan)
    assert plan.of("model.layers.1.mlp.down_proj").reason == "kept: --keep"
    assert record.schemes["w8a8"] == len(plan.quantised)
    assert len(plan.quantised) >= 8
    assert json.loads((bundle.path / record.gate).read_text())["passed"] is True
    assert manifest.tensorrt.attention == "native"
    assert [done.changed for done in manifest.passes if done.name in ("cast_precision", "cast_attention")] == [True] * 2
    (check,) = manifest.checks
    assert check.value <= check.limit
    layers = layers_from_file(bundle.path / "layers.json")
    fused = {name for layer in layers if layer.multiplies_in_8_bits for name in layer.nodes}
    assert set(plan.quantised) <= fused
    assert not {"lm_head", "model.layers.1.mlp.down_proj"} & fused


def test_what_the_gate_refuses_is_not_built(llama, tmp_path: Path) -> None:
    """One layer is quantised, and that is too much for these limits."""
    (tmp_path / "limits.toml").write_text(LOOSE.replace("kl_mean = 10", "kl_mean = 1e-9"))
    keep = [f"--keep={layers}" for layers in ("*self_attn*", "*gate_proj", "*down_proj", "*.1.mlp.up_proj")]
    build = command(llama, tmp_path / "out" / "bundle", tmp_path / "limits.toml")
    done = CliRunner().invoke(kiln_group, [*build, *keep])
    assert isinstance(done.exception, GateFailedError)
    assert "kl_mean" in str(done.exception) or "mean KL" in str(done.exception)
    assert "model.layers.0.mlp.up_proj" in str(done.exception)
    assert not (tmp_path / "out").exists()
