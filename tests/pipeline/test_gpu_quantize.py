"""Quantised builds for GPUs on a machine without one: plans from what was measured, gate, bundle, refusals."""

import io
import json
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from engines.backends.onnxruntime import OnnxRuntimeDecoder
from engines.bundle import open_bundle
from engines.sku import resolve_sku
from passes.onnx_model import OnnxModel, load_structure
from passes.quantization.layers import Layer
from passes.quantization.plan import LayerPlan, PrecisionPlan, plan_from_toml
from passes.standard import WIDE_TABLE
from pipeline.build import build
from pipeline.config import BuildConfig
from pipeline.cpu_form import needs_cpu_form, write_cpu_form
from pipeline.expected import expected_from_file
from pipeline.export import export_model
from pipeline.floors import decoder_work_from_graph
from pipeline.gate.config import GateConfig
from pipeline.gate.report import GateFailedError
from pipeline.load import load
from pipeline.operator_work import LowBitProduct
from pipeline.optimize import OptimizeConfig, optimize
from pipeline.profile.graph_facts import facts_of_decoder
from pipeline.progress import Progress
from pipeline.quantize import judging, sku_speed
from pipeline.quantize.building import quantised_engine
from pipeline.quantize.config import QuantizeConfig
from pipeline.quantize.sku_speed import SkuSpeed, speed_of
from pipeline.source import resolve_source
from plugins.errors import KilnError
from plugins.quant_matmul.cuda_choice import Choices, Measured
from tests.pipeline.quantize_material import FEW, LOOSE

pytest.importorskip("torch")

HEADS = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 192}
PASSES = OptimizeConfig(precision="bf16", verify=False)
INSIDE = ("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj")


@pytest.fixture(scope="module")
def folder(make_llama) -> Path:
    """A random Llama with a tokenizer, and heads that the CUDA attention takes."""
    return make_llama(**HEADS)


@pytest.fixture(scope="module")
def loose(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("limits") / "limits.toml"
    path.write_text(LOOSE)
    return path


def built(folder: Path, out: Path, *skus: str, precision: str = "bf16", **options):
    """The bundles, and what was said."""
    text = io.StringIO()
    quantize = QuantizeConfig(**{"generate": 8, "calibration": FEW, **options})
    config = BuildConfig(out=out, precision=precision, quantize=quantize, verify_passes=False)
    made = build(str(folder), skus or ["h200"], config, Progress(Console(file=text, width=400)))
    return [item.bundle for item in made], text.getvalue()


@pytest.fixture(scope="module")
def int8(folder, compiled, loose, tmp_path_factory):
    """For an H200 and, from the same export, an H100, whose products nobody measured."""
    out = tmp_path_factory.mktemp("int8") / "b"
    return built(folder, out, "h200", "h100-sxm", quant="int8", kv="int8-kv", kv_limit=200, limits=loose)


def nodes_of(path: Path, op: str) -> dict[str, dict[str, int]]:
    found = (node for node in load_structure(path).graph.node if node.op_type == op)
    return {node.name: {attribute.name: attribute.i for attribute in node.attribute} for node in found}


def test_the_engine_has_quantised_products_between_ends_of_sixteen_bits(int8) -> None:
    bundle = int8[0][0]
    manifest = open_bundle(bundle.path).manifest
    assert manifest.quantization.schemes == {"float": 2, "w8a8-dynamic": 7}
    gated, plain = (nodes_of(bundle.engine_path, f"QuantLinear{kind}") for kind in ("SwiGlu", ""))
    assert (len(gated), len(plain), len(nodes_of(bundle.engine_path, "Linear"))) == (2, 5, 2)
    assert set(plain) >= set(INSIDE)
    assert all(node == {"format": 0, "group_size": 0, "kernel_rows": 32} for node in [*gated.values(), *plain.values()])
    assert not [record.name for record in manifest.passes if record.rolled_back]
    assert {"quantize_linear", "quantize_cache", "cast_attention"} <= {p.name for p in manifest.passes if p.changed}
    assert not nodes_of(bundle.engine_path, "MatMul")
    assert {path.name for path in bundle.path.iterdir()} >= {"engine.onnx", "quantization", "tokenizer", "plugins"}
    assert not (bundle.path / "work").exists()


def test_a_profile_knows_what_its_products_multiply_in(int8) -> None:
    bundle = int8[0][0]
    facts = facts_of_decoder(bundle.engine_path, bundle.manifest.decoder)
    products = nodes_of(bundle.engine_path, "QuantLinear") | nodes_of(bundle.engine_path, "QuantLinearSwiGlu")
    assert set(facts.low_bit) == set(products)
    assert set(facts.low_bit.values()) == {LowBitProduct("int8", 32)}
    assert facts.windows == (None, None)


def test_the_cache_is_int8_as_the_cuda_decoder_opens_it(int8) -> None:
    manifest = int8[0][0].manifest
    assert manifest.decoder.kv.dtypes == ("int8", "int8")
    assert manifest.decoder.max_context == 200
    kinds = {tensor.name: tensor.dtype for tensor in (*manifest.inputs, *manifest.outputs)}
    for layer in range(2):
        for tensor in manifest.decoder.kv.tensors(layer):
            assert kinds[tensor.name] == kinds[tensor.output_name] == tensor.dtype


def test_the_manifest_says_what_was_not_verified_and_not_measured(int8) -> None:
    (h200, h100), said = int8
    manifest = h200.manifest
    assert manifest.quantization.unmeasured == 7
    assert "kernels did not run" in manifest.unverified[0]
    assert "7 of 7 quantised layers have shapes that were not measured on h200" in manifest.unverified[-1]
    assert "not measured on h100-sxm" in h100.manifest.unverified[-1]
    assert f"run: kiln tune {h200.path}" in said
    plan = plan_from_toml(h200.path / manifest.quantization.plan)
    assert plan.of(INSIDE[0]).reason == "a shape that was not measured on h200"
    assert plan.of(INSIDE[0]).kernel_rows == 32
    assert plan.of("lm_head").reason == "kept: an end of the model"


def test_the_gate_judged_it_in_three_dimensions_against_fp32(int8) -> None:
    bundle = int8[0][0]
    report = json.loads((bundle.path / bundle.manifest.quantization.gate).read_text())
    assert report["passed"] is True
    assert {check["dimension"] for check in report["checks"]} == {"numeric", "distribution", "generation"}
    assert set(report["schemes"]) == {"int8-kv", "w8a8-dynamic"}
    names = {row["name"] for stratum in report["strata"] for row in stratum["layers"]}
    assert names >= {*INSIDE, "lm_head"}
    assert len(names) == 9, "gate and up have a row, too"
    (check,) = bundle.manifest.checks
    assert check.value <= check.limit == 1e-4, "of the float graph, before it is cast"


def test_expected_logits_are_those_of_the_quantised_graph(int8, compiled, tmp_path) -> None:
    """So that what the device is held to is its kernels' error, not the model's."""
    bundle = int8[0][0]
    manifest, expected = bundle.manifest, expected_from_file(bundle.path / bundle.manifest.expected)
    form = write_cpu_form(bundle.engine_path, tmp_path)
    assert not needs_cpu_form(load_structure(form))
    backend = OnnxRuntimeDecoder(form, manifest.decoder.kv, 64, plugins=[compiled])
    assert expected.worst_error(backend, manifest.decoder) < 2e-2


def test_fewer_bytes_are_read(int8, compiled, folder, tmp_path) -> None:
    bundle = int8[0][0]
    config = BuildConfig(out=tmp_path / "b", precision="bf16", verify_passes=False)
    plain = build(str(folder), ["h200"], config, Progress(Console(file=io.StringIO())))[0].bundle
    works = [decoder_work_from_graph(one.engine_path, one.manifest.decoder) for one in (bundle, plain)]
    assert works[0].body_parameters == works[1].body_parameters
    assert 0.5 < works[0].weight_bytes / works[1].weight_bytes < 0.9


@pytest.fixture(scope="module")
def wide(folder, compiled, silent, tmp_path_factory) -> tuple[OnnxModel, Path, Path]:
    """The FP32 graph that a build quantises, its tokenizer, and the CPU's library."""
    work = tmp_path_factory.mktemp("wide")
    model = load(resolve_source(str(folder)))
    model.tokenizer.save_pretrained(work / "tokenizer")
    exported = export_model(model, work / "exported.onnx", BuildConfig())
    made, _ = optimize(exported, work / "wide.onnx", resolve_sku("h200"), PASSES, table=WIDE_TABLE)
    return made, work / "tokenizer", compiled


def requantised(wide: tuple[OnnxModel, Path, Path], folder: Path, silent, **options):
    """What a build does after the FP32 passes: the engine and its record."""
    folder.mkdir()
    config = QuantizeConfig(**{"generate": 8, "calibration": FEW, **options})
    model, tokenizer, library = wide
    sku, target = resolve_sku("h200"), folder / "engine.onnx"
    made, _, record = quantised_engine(model, target, sku, PASSES, config, [library], tokenizer, None, silent)
    return made, record


@pytest.mark.parametrize(
    ("options", "format_of", "schemes"),
    [
        ({"quant": "int4", "rounding": "hqq", "kv": "int8-k"}, 2, {"float": 2, "w4a16": 7}),
        ({"quant": "fp8", "keep_ends": False}, 1, {"fp8": 9}),
        ({"quant": "int8", "rounding": "awq", "keep": ("*.down_proj",)}, 0, {"float": 4, "w8a8-dynamic": 5}),
    ],
    ids=str,
)
def test_other_schemes(wide, loose, silent, tmp_path, options, format_of, schemes) -> None:
    made, record = requantised(wide, tmp_path / "b", silent, limits=loose, **options)
    assert record.schemes == schemes
    products = nodes_of(made.path, "QuantLinear") | nodes_of(made.path, "QuantLinearSwiGlu")
    assert len(products) == sum(count for name, count in record.schemes.items() if name != "float") > 0
    assert {attributes["format"] for attributes in products.values()} == {format_of}
    assert made.decoder.kv.dtypes == ("int8" if "kv" in options else "bfloat16", "bfloat16")


def test_the_gate_refuses_and_names_layers(wide, silent, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(judging, "GateConfig", partial(GateConfig, max_trials=2))
    limits = tmp_path / "tight.toml"
    limits.write_text(LOOSE.replace("kl_mean = 10", "kl_mean = 1e-9"))
    with pytest.raises(GateFailedError, match="the gate failed") as caught:
        requantised(wide, tmp_path / "b", silent, quant="int4", limits=limits)
    advice = caught.value.report.advice
    assert set(advice.ranking) >= set(INSIDE)
    assert advice.trials


def test_a_plan_can_be_given_and_edited(wide, loose, silent, tmp_path) -> None:
    plan = tmp_path / "plan.toml"
    layers = {INSIDE[0]: LayerPlan("fp8", kernel_rows=16), INSIDE[1]: LayerPlan("w4a16", 128)}
    plan.write_text(PrecisionPlan(wide[0].sha256, layers).to_toml())
    made, record = requantised(wide, tmp_path / "b", silent, plan=plan, limits=loose)
    assert record.schemes == {"float": 7, "fp8": 1, "w4a16": 1}
    attributes = nodes_of(made.path, "QuantLinear")
    assert attributes[INSIDE[0]] == {"format": 1, "group_size": 0, "kernel_rows": 16}
    assert attributes[INSIDE[1]] == {"format": 2, "group_size": 128, "kernel_rows": 32}
    plan.write_text(plan.read_text().replace("o_proj", "p_proj"))
    with pytest.raises(KilnError, match=r"names the layer 'model.layers.0.self_attn.p_proj', which the model lacks"):
        requantised(wide, tmp_path / "none", silent, plan=plan, limits=loose)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quant": "w8a16"}, "cuda-plugins has no w8a16 for any of the 9 layers; it has fp8, w4a16, w8a8-dynamic"),
        ({"quant": "int4", "group_size": 64}, "groups of 64; expected 0 or a multiple of 128"),
        ({"keep": ("nothing",)}, "--keep nothing matches no layer; the model has 9"),
    ],
    ids=str,
)
def test_what_there_is_not_is_refused_in_the_plan(wide, silent, loose, tmp_path, options, says) -> None:
    with pytest.raises(KilnError, match=says):
        requantised(wide, tmp_path / "b", silent, limits=loose, **options)


def test_layers_that_do_not_win_stay_in_sixteen_bits(wide, silent, loose, tmp_path, monkeypatch) -> None:
    """As measured: down is slower in int8, and nothing is known of the others."""
    times = {"cublas": 5.0, "int8": 6.0, "int8 w8a8": 7.0}
    table = Choices("Some GPU", (Measured("down", 128, 192, False, 8, times),))
    monkeypatch.setattr(sku_speed, "recorded", lambda name: table)
    _, record = requantised(wide, tmp_path / "b", silent, limits=loose)
    plan = plan_from_toml(tmp_path / "b" / record.plan)
    assert plan.of(INSIDE[1]).reason.startswith("not faster at every batch: 1.20 to 1.20 of 16 bits' time as down on")
    assert record.schemes == {"float": 7, "w8a8-dynamic": 2}, "near are o_proj [128, 128] and q_proj [256, 128], too"
    assert record.unmeasured == 2
    _, every = requantised(wide, tmp_path / "all", silent, limits=loose, search="all")
    assert every.schemes == {"float": 2, "w8a8-dynamic": 7}
    assert plan_from_toml(tmp_path / "all" / every.plan).of(INSIDE[1]).kernel_rows == 8


@pytest.mark.parametrize(
    ("sku", "options", "says"),
    [
        ("h200", {"precision": "fp32"}, "quantised engines for h200 have activations of 16 bits: use --precision fp16"),
        ("a100-80", {"quant": "fp8"}, "a100-80 has no fp8; it offers fp32, tf32, fp16, bf16, int8"),
        ("h200", {"attention": "bf16"}, "--attention is for CPUs; on h200 attention computes in bf16"),
        ("jetson-orin", {}, "quantises for CPUs, and for GPUs with ONNX Runtime; jetson-orin has tensorrt"),
    ],
    ids=str,
)
def test_what_there_is_not_is_refused(folder, compiled, loose, tmp_path, sku, options, says) -> None:
    with pytest.raises(KilnError, match=says):
        built(folder, tmp_path / "b", sku, limits=loose, **options)
    assert not (tmp_path / "b").exists()


def test_models_without_a_cache_are_refused(tmp_path) -> None:
    import onnx

    text = '<ir_version: 9, opset_import: ["": 18]> net (float[B,8] x) => (float[B,8] y) { y = Relu(x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "net.onnx")
    with pytest.raises(KilnError, match=r"quantised engines for l4 are language models; .*net\.onnx is none"):
        built(tmp_path / "net.onnx", tmp_path / "b", "l4")


SKU = SkuSpeed(
    "some-gpu",
    1e12,
    Choices(
        "Some GPU",
        tuple(
            Measured(name, width, depth, swiglu, batch, times)
            for name, width, depth, swiglu, by_batch in (
                ("wide", 4096, 1024, False, ({"cublas": 10.0, "int8": 6.0}, {"cublas": 10.0, "int8 w8a8": 8.0})),
                ("slow", 1024, 1024, False, ({"cublas": 10.0, "int8": 6.0}, {"cublas": 10.0, "int8 w8a8": 12.0})),
                ("gated", 1024, 1024, True, ({"cublas": 10.0, "int8": 9.0}, {"cublas": 10.0, "int8": 9.0})),
            )
            for batch, times in zip((8, 64), by_batch, strict=True)
        ),
    ),
)


def layer(width: int, depth: int) -> Layer:
    return Layer("fc", "MatMul", "x", "w", "y", depth, width)


def test_a_measured_shape_decides() -> None:
    wide = SKU.of(layer(4096, 1024), False, LayerPlan("w8a8-dynamic"))
    assert (wide.wins, wide.kernel_rows, wide.measured) == (True, 8, True)
    assert wide.saved == pytest.approx(3e-6)
    assert wide.origin == "0.60 to 0.80 of 16 bits' time as wide on Some GPU"
    assert not SKU.of(layer(1024, 1024), False, LayerPlan("w8a8-dynamic")).wins
    gated = SKU.of(layer(2048, 1024), True, LayerPlan("w8a8-dynamic"))
    assert (gated.wins, gated.kernel_rows) == (True, 64)


def test_the_nearest_shape_stands_for_others_within_a_factor_of_two() -> None:
    near = SKU.of(layer(2560, 1024), False, LayerPlan("w8a8-dynamic"))
    assert near.origin.endswith("as the nearest shape, wide [4096, 1024], on Some GPU")
    assert not SKU.of(layer(1536, 1024), False, LayerPlan("w8a8-dynamic")).wins, "slow is nearer"
    for far in (layer(8193, 1024), layer(511, 1024), layer(4096, 2049)):
        found = SKU.of(far, False, LayerPlan("w8a8-dynamic"))
        assert (found.wins, found.kernel_rows, found.measured) == (True, 32, False)
        assert found.saved == pytest.approx(far.parameters / 1e12)


def test_an_h200_has_int8_for_every_layer_of_a_llama_8b() -> None:
    speed = speed_of(resolve_sku("h200"))
    shapes = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
    for name, shape in shapes.items():
        found = speed.of(layer(*shape), name == "gate_up", LayerPlan("w8a8-dynamic"))
        assert (found.wins, found.measured) == (True, True), name
        assert found.saved > 0
        assert f"as {name} on" in found.origin
    assert not speed.of(layer(4096, 4096), False, LayerPlan("fp8")).wins
    assert speed_of(resolve_sku("l4")).choices is None
