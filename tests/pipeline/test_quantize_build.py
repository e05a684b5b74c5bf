"""build-engine --quant on small models: what is published, what is refused, and that nothing is left of the latter."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines.bundle import open_bundle
from engines.manifest import QuantizationRecord
from engines.runtime.engine import Engine
from engines.sku import resolve_sku
from passes.onnx_model import onnx_model_from_path
from passes.quantization.plan import plan_from_toml
from passes.quantization.table import table_from_json
from pipeline.build import build
from pipeline.config import BuildConfig
from pipeline.floors import decoder_work_from_graph
from pipeline.gate.report import GateFailedError
from pipeline.optimize import OptimizeConfig
from pipeline.paired import LEAST_PAIRS, Interval
from pipeline.quantize.building import quantised_engine
from pipeline.quantize.config import QuantizeConfig
from pipeline.quantize.latency import Latency
from plugins.build import cpu_library
from plugins.errors import KilnError
from tests.pipeline.quantize_material import FEW, LOOSE

pytest.importorskip("torch")


def in_ratio(ratio: float) -> Latency:
    """What a layer takes whose planned form is so much slower, as measured without noise."""
    return Latency(1.0, Interval(ratio, ratio, ratio, LEAST_PAIRS))


@pytest.fixture(scope="module")
def loose(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("limits") / "limits.toml"
    path.write_text(LOOSE)
    return path


def config_of(**options) -> QuantizeConfig:
    defaults = {"search": "all", "generate": 8, "calibration": FEW, "attention": "fp32"}
    return QuantizeConfig(**{**defaults, **options})


def built(model: str, out: Path, silent, **options) -> Path:
    build(model, ["cpu"], BuildConfig(out=out, quantize=config_of(**options), verify_passes=False), silent)
    return out


def requantised(float_bundle: Path, folder: Path, silent, **options) -> QuantizationRecord:
    """What a build does after the float passes, with a bundle's graph for theirs."""
    folder.mkdir()
    model = onnx_model_from_path(float_bundle / "engine.onnx")
    passes = OptimizeConfig(verify=False)
    libraries = [cpu_library()]
    tokenizer = float_bundle / "tokenizer"
    return quantised_engine(
        model,
        folder / "engine.onnx",
        resolve_sku("cpu"),
        passes,
        config_of(**options),
        libraries,
        tokenizer,
        None,
        silent,
    )[2]


@pytest.fixture(scope="module")
def dynamic(llama_folder, loose, silent, tmp_path_factory) -> Path:
    """A tiny Llama, INT8 with scales by row."""
    out = tmp_path_factory.mktemp("quantised") / "dynamic"
    return built(str(llama_folder), out, silent, limits=loose, keep=("*.down_proj",))


def operators(bundle: Path) -> list[str]:
    import onnx

    return [node.op_type for node in onnx.load(bundle / "engine.onnx", load_external_data=False).graph.node]


def test_a_decoder_is_quantised_by_row(dynamic):
    bundle = open_bundle(dynamic)
    record = bundle.manifest.quantization
    assert record.schemes == {"w8a16": 2, "w8a8-dynamic": 7, "float": 2}
    assert "the gate passed" in record.verdict
    plan = plan_from_toml(dynamic / record.plan)
    assert plan.of("model.layers.1.mlp.down_proj").reason == "kept: --keep"
    assert plan.of("model.layers.1.mlp.gate_proj").scheme == "w8a8-dynamic"
    assert plan.of("lm_head").scheme == "w8a16"
    assert json.loads((dynamic / record.gate).read_text())["passed"] is True
    ops = operators(dynamic)
    assert (ops.count("Int8MatMul"), ops.count("WeightMatMul"), ops.count("MatMul")) == (7, 2, 2)
    assert ops.count("AddRmsNormQuantize") >= 1
    assert {path.name for path in dynamic.iterdir()} >= {"engine.onnx", "quantization", "tokenizer"}
    assert not (dynamic / "work").exists()
    assert not (dynamic / "float").exists()
    with Engine.open(dynamic) as engine:
        assert len(engine.generate(["the quick brown"])[0].token_ids) > 0


def test_floors_count_quantised_products_too(dynamic, llama_bundle):
    quantised, plain = (
        decoder_work_from_graph(path / "engine.onnx", open_bundle(path).manifest.decoder)
        for path in (dynamic, llama_bundle)
    )
    assert (quantised.body_parameters, quantised.head_parameters) == (plain.body_parameters, plain.head_parameters)
    assert plain.weight_bytes / 4 < quantised.weight_bytes < plain.weight_bytes / 2


def test_a_plan_can_be_given_and_edited(dynamic, llama_bundle, loose, silent, tmp_path):
    text = (dynamic / "quantization/plan.toml").read_text()
    plan = tmp_path / "plan.toml"
    plan.write_text(text.replace('scheme = "w8a16"', 'scheme = "float"'))
    record = requantised(llama_bundle, tmp_path / "out", silent, plan=plan, limits=loose)
    assert record.schemes == {"w8a8-dynamic": 7, "float": 4}
    plan.write_text(text.replace("model.layers.1.mlp.up_proj", "model.layers.7.mlp.up_proj"))
    with pytest.raises(KilnError, match=r"names the layer 'model.layers.7.mlp.up_proj', which the model lacks"):
        requantised(llama_bundle, tmp_path / "none", silent, plan=plan, limits=loose)


def test_static_ranges_are_calibrated_and_kept(llama_bundle, make_llama, loose, silent, tmp_path):
    options = {"quant": "w8a8", "limits": loose}
    record = requantised(llama_bundle, tmp_path / "static", silent, smooth=0.5, **options)
    path = tmp_path / "static" / record.table
    table = table_from_json(path)
    assert table.data_sha256 == record.data_sha256
    assert set(table.samples) == {"short", "medium", "long", "near-limit"}
    assert record.schemes["w8a8"] == 9
    again = requantised(llama_bundle, tmp_path / "again", silent, table=path, **options)
    assert (tmp_path / "again" / again.table).read_text() == path.read_text()
    path.write_text(path.read_text().replace(table.model_sha256, "0" * 64))
    with pytest.raises(KilnError, match=r"was made from the model 000000000000, .*; calibrate again"):
        requantised(llama_bundle, tmp_path / "other", silent, table=path, **options)


def test_a_cache_can_be_int8_with_a_limit(llama_bundle, loose, silent, tmp_path):
    record = requantised(llama_bundle, tmp_path / "out", silent, quant="none", kv="int8-kv", kv_limit=200, limits=loose)
    assert (record.schemes, record.kv) == ({"float": 11}, "int8-kv")
    decoder = onnx_model_from_path(tmp_path / "out/engine.onnx").decoder
    assert decoder.max_context == 200
    assert decoder.kv.dtypes == ("int8", "int8")


@pytest.mark.parametrize(("seconds", "pays"), [(0.5, True), (0.99, False)])
def test_prompts_attend_in_bf16_where_that_is_faster(llama_bundle, loose, silent, tmp_path, monkeypatch, seconds, pays):
    import onnx

    from passes.manager import Timing
    from pipeline.quantize import stage

    monkeypatch.setattr(stage.StepClock, "__call__", lambda self, before, after: Timing(1.0, seconds, 0.05))
    requantised(llama_bundle, tmp_path / "out", silent, attention="auto", limits=loose)
    graph = onnx.load(tmp_path / "out/engine.onnx", load_external_data=False).graph
    attention = [node for node in graph.node if node.op_type == "PagedAttention"]
    chosen = [{a.name: a.i for a in node.attribute}.get("compute_dtype", 0) for node in attention]
    assert chosen == [int(pays)] * 2


def test_the_gate_refuses_and_names_layers(llama_bundle, silent, tmp_path):
    limits = tmp_path / "tight.toml"
    limits.write_text(LOOSE.replace("kl_mean = 10", "kl_mean = 1e-9"))
    with pytest.raises(GateFailedError, match=r"the gate failed in .*mean KL divergence") as caught:
        requantised(llama_bundle, tmp_path / "out", silent, quant="w4a16", limits=limits)
    assert set(caught.value.report.advice.ranking) >= {"lm_head", "model.layers.0.mlp.gate_proj"}
    assert caught.value.report.advice.trials


def test_a_gate_that_refuses_ends_with_3(llama_folder, tmp_path):
    (tmp_path / "tight.toml").write_text("[limits]\nkl_mean = 1e-9\n")
    command = [sys.executable, "-c", "from pipeline.cli import *; run_command(build_engine_command)", str(llama_folder)]
    command += ["--quant", "int8", "--search", "all", "--gate-limits", str(tmp_path / "tight.toml"), "--no-verify"]
    command += ["--gate-tokens", "8", "--out", str(tmp_path / "out"), "--keep", "model.layers.0.*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "the gate failed" in done.stderr
    assert "--keep" in done.stderr
    assert "nothing was published" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": ("nothing.like.it",)}, "--keep nothing.like.it matches no layer; the model has 11"),
        ({"quant": "fp8"}, "has no fp8 for any of the 11 layers; it has .*w8a8-dynamic"),
        ({"quant": "w8a8", "specs": ("one.txt",)}, "the calibration set one.txt holds one sample"),
        ({"quant": "w8a8", "specs": ("none.txt",)}, "'none.txt' does not exist"),
        ({"plan": Path("none.toml")}, "the plan none.toml cannot be read"),
        ({"limits": Path("none.toml")}, "the limits none.toml cannot be read"),
    ],
)
def test_bad_input_is_refused(llama_bundle, silent, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    Path("one.txt").write_text("one line only\n")
    with pytest.raises(KilnError, match=message):
        requantised(llama_bundle, tmp_path / "out", silent, **options)


def small_cnn():
    """For build-engine's module:callable."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3), torch.nn.ReLU()]
    layers += [torch.nn.Conv2d(8, 8, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 5)]
    net = torch.nn.Sequential(*layers).eval()
    return net, {"input": torch.randn(1, 3, 16, 16)}


def test_a_network_of_convolutions_is_quantised_by_calibrated_ranges(silent, tmp_path, loose, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    images = np.random.default_rng(0).normal(size=(8, 1, 3, 16, 16)).astype(np.float32)
    folder = tmp_path / "images"
    folder.mkdir()
    for number, image in enumerate(images):
        np.savez(folder / f"{number}.npz", input=image)
    out = built("test_quantize_build:small_cnn", tmp_path / "out", silent, specs=(str(folder),))
    bundle = open_bundle(out)
    assert bundle.manifest.quantization.schemes == {"float": 2, "w8a8": 2}
    assert "QLinearConv" in operators(out)
    with Engine.open(out) as engine:
        net, _ = small_cnn()
        import torch

        expected = net(torch.from_numpy(images[0])).detach().numpy()
        found = next(iter(engine.infer({"input": images[0]}).values()))
    cosine = float((expected * found).sum() / np.linalg.norm(expected) / np.linalg.norm(found))
    assert cosine > 0.99


def test_layers_that_get_slower_stay_float(llama_bundle, silent, tmp_path, loose, monkeypatch):
    from pipeline.quantize import latency

    def alternate(models, feeds):
        return in_ratio(0.5 if next(iter(feeds[0].values())).shape[-1] == 64 else 2.0)

    monkeypatch.setattr(latency, "_alternate", alternate)
    record = requantised(llama_bundle, tmp_path / "out", silent, search="latency", limits=loose)
    plan = plan_from_toml(tmp_path / "out" / record.plan)
    slower = [name for name, layer in plan.layers.items() if layer.reason == "not faster here"]
    assert slower == ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]


def test_sensitive_layers_stay_float_and_findings_are_kept(llama_bundle, silent, tmp_path, loose, monkeypatch):
    from pipeline.quantize import latency

    monkeypatch.setattr(latency, "_alternate", lambda models, feeds: in_ratio(0.5))
    findings = tmp_path / "findings.jsonl"
    options = {"search": "sensitivity", "limits": loose, "findings": findings, "quant": "w4a16", "keep_ends": False}
    first = requantised(llama_bundle, tmp_path / "first", silent, **options)
    assert len(findings.read_text().splitlines()) == 11
    findings.write_text(findings.read_text() + '{"cut short')
    second = requantised(llama_bundle, tmp_path / "second", silent, **options)
    folders = (tmp_path / "first", tmp_path / "second")
    plans = [plan_from_toml(folder / r.plan) for folder, r in zip(folders, (first, second), strict=True)]
    assert plans[0].layers == plans[1].layers
    assert len(findings.read_text().splitlines()) == 12  # nothing was measured again
    assert all(layer.reason for layer in plans[0].layers.values())


def test_options_are_checked():
    with pytest.raises(KilnError, match="--quant is 'int3'; expected one of none, int8, int4, w8a8"):
        QuantizeConfig(quant="int3")
    with pytest.raises(KilnError, match="--generate is 0"):
        replace(QuantizeConfig(), generate=0)


@pytest.mark.parametrize(("together", "schemes"), [(0.5, {"float": 2, "w8a8": 2}), (2.0, {"float": 3, "w8a8": 1})])
def test_integers_between_neighbours_are_timed_too(silent, tmp_path, loose, monkeypatch, together, schemes):
    from passes.manager import Timing
    from pipeline.quantize import latency, stage

    def alternate(models, feeds):
        kinds = [next(iter(feed.values())).dtype.name for feed in feeds]
        assert kinds == ["float32", "uint8"]  # neighbours give integers
        size = next(iter(feeds[0].values())).shape[-1]
        return in_ratio(0.5 if size == 14 else 2.0)

    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    monkeypatch.setattr(latency, "_alternate", alternate)
    monkeypatch.setattr(stage.StepClock, "__call__", lambda self, before, after: Timing(1.0, together, 0.05))
    data = tmp_path / "images.npz"
    np.savez(data, input=np.random.default_rng(0).normal(size=(8, 3, 16, 16)).astype(np.float32))
    options = {"specs": (str(data),), "search": "latency"}
    out = built("test_quantize_build:small_cnn", tmp_path / "out", silent, limits=loose, **options)
    assert open_bundle(out).manifest.quantization.schemes == schemes
