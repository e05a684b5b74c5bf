"""The attention plug-in without a GPU: what TensorRT's own classes learn of it, its graph, PTX, and refusals."""

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from engines.backends.tensorrt.build import build_plan
from engines.backends.tensorrt.options import TensorRtOptions
from engines.backends.tensorrt.plugin_graph import PluginTarget, abi_of, plugin_graph
from engines.backends.tensorrt.profiles import ServingShapes, derive_profiles
from engines.sku import sku_table
from passes.onnx_model import OnnxModel
from plugins.abi import abi_hash
from plugins.errors import KilnError
from plugins.paged_attention.tensorrt_plugin import LAYERS, SCRATCH, Fields, Kernels, Numbers

from .plugin_layers import EVALUATED
from .serving import Shape, evaluated_steps, serving_graph

HERE = Path(__file__).parent
FIELDS = Fields(8, 2, 0.0, 5.0, 40, 1, 1, abi_hash())
KERNELS = Kernels("float16", 64, "sm_89", 4, 2, 58, 16)
TARGET = PluginTarget("sm_89", 58, 16)
SIZES = {
    "query": ("HALF", (20, 512)),
    **dict.fromkeys(("key", "value"), ("HALF", (20, 128))),
    **dict.fromkeys(("key_cache", "value_cache"), ("HALF", (40, 16, 2, 64))),
    "cumulative_sequence_length": ("INT32", (4,)),
    "past_seqlens": ("INT32", (3,)),
    "block_table": ("INT32", (3, 5)),
    "slot_mapping": ("INT32", (20,)),
    **dict.fromkeys(("cos_cache", "sin_cache"), ("FLOAT", (100, 32))),
    SCRATCH: ("INT32", (KERNELS.scratch,)),
    "output": ("HALF", (20, 512)),
}
needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="nvcc is not installed: apt install cuda-nvcc-13-0"
)


@needs_nvcc
@pytest.mark.slow
def test_tensorrt_learns_what_the_kernels_are_launched_with(builder) -> None:
    """Through `tensorrt.plugin` of TensorRT 11.4: types, shapes, aliases, grid, threads, memory, integers and PTX."""
    asked = {
        "kernels": vars(KERNELS),
        "layers": {
            layer.name: {"fields": FIELDS.text, "inputs": {name: SIZES[name] for name in layer.inputs}}
            for layer in LAYERS
        },
    }
    command, environment = [sys.executable, str(HERE / "drive_plugin.py")], dict(builder.environment)
    environment["PYTHONPATH"] = f"{HERE.parents[2]}:{environment['PYTHONPATH']}"
    done = subprocess.run(
        command, input=json.dumps(asked), env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    for layer in LAYERS:
        learnt, shapes = answer[layer.name], {name: SIZES[name][1] for name in layer.inputs}
        launch = layer.launch(KERNELS, FIELDS, shapes, Numbers())
        assert learnt["grid"] == [launch.grid, 1, 1]
        assert learnt["threads"] == [launch.threads, 1, 1]
        assert learnt["shared_bytes"] == launch.shared_bytes
        assert learnt["integers"] == list(launch.integers)
        assert learnt["count"] == len(launch.integers)
        assert learnt["kernel"] == layer.kernel
        assert learnt["entry"]
        assert learnt["linear"]
        assert learnt["types"] == [SIZES[name][0] for name in layer.outputs]
        assert learnt["shapes"] == [list(SIZES[name][1]) for name in layer.outputs]
        expected = [layer.inputs.index(name) if name in layer.inputs else -1 for name in layer.outputs]
        assert learnt["aliases"] == expected


def test_launches_follow_the_sizes() -> None:
    write, decode, prefill = LAYERS
    shapes = {name: shape for name, (_, shape) in SIZES.items()}
    assert write.launch(KERNELS, FIELDS, shapes, Numbers()).grid == 5  # 20 warps, 4 in a block
    assert decode.launch(KERNELS, FIELDS, shapes, Numbers()).grid == 58
    # 80 rows: one tile of 64 and, at most, three sequences that end with one that is not full; twice for two KV heads
    assert prefill.launch(KERNELS, FIELDS, shapes, Numbers()).grid == 8
    one = {**shapes, "query": (1, 512), "key": (1, 128)}
    assert prefill.launch(KERNELS, FIELDS, one, Numbers()).grid == 2, "no grid is empty"
    assert KERNELS.decode_bytes(KERNELS.plan, 16) <= 99 * 1024


@needs_nvcc
@pytest.mark.slow
def test_ptx_compiles_for_every_architecture_of_the_sku_table() -> None:
    architectures = sorted({sku.arch for sku in sku_table().values() if sku.arch.startswith("sm_")} - {"sm_75"})
    assert len(architectures) > 5
    kernels = [replace(KERNELS, architecture=architecture) for architecture in architectures]
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(Kernels.ptx, kernels))
    sizes = {name: shape for name, (_, shape) in SIZES.items()}
    for architecture, ptx in zip(architectures, texts, strict=True):
        assert f".target {architecture}" in ptx
        for layer in LAYERS:
            head = ptx.split(f".entry {layer.kernel}(", 1)[1].split(")", 1)[0]
            assert head.count(".param .u64") == len(layer.inputs) + len(layer.outputs)
            assert head.count(".param .u32") == len(layer.launch(KERNELS, FIELDS, sizes, Numbers()).integers)


@pytest.fixture
def model(tmp_path: Path) -> OnnxModel:
    return serving_graph(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(packed=True, window=6), Shape(rotary=0, scale=0.2), Shape(rotary=32, interleaved=1)],
    ids=str,
)
def test_the_graph_computes_what_the_operator_does(shape: Shape, tmp_path: Path) -> None:
    model = serving_graph(tmp_path / "model.onnx", shape)
    made, kernels = plugin_graph(model, tmp_path / "plugin.onnx", TARGET)
    assert kernels.head_dim == 64
    assert abi_of(made.path) == abi_hash()
    assert made.decoder is not None
    assert made.decoder.kv.dtype == "float16"
    graph = ReferenceEvaluator(onnx.load(made.path), new_ops=EVALUATED)
    for expected, feeds in evaluated_steps(model, made.decoder.kv):
        names = [tensor.name for tensor in made.inputs]
        outputs = graph.run(None, {name: feeds.get(name, np.zeros(kernels.scratch, np.int32)) for name in names})
        found = dict(zip([tensor.name for tensor in made.outputs], outputs, strict=True))
        assert np.abs(found["logits"] - expected).max() <= 2e-2 * np.abs(expected).max()
        for name in feeds:
            if "cache." in name:
                feeds[name][...] = found[name.replace("cache.", "cache_out.")]


@needs_nvcc
@pytest.mark.slow
def test_the_builders_process_registers_the_layers(builder, model: OnnxModel, tmp_path: Path) -> None:
    """As far as the stand-in goes: TensorRT-RTX has no networks with plug-ins from Python, and says so."""
    made, kernels = plugin_graph(model, tmp_path / "plugin.onnx", TARGET)
    profiles = derive_profiles(made.inputs, made.decoder, ServingShapes(max_running=4, tokens_per_step=32))
    (tmp_path / "plan").mkdir()
    with pytest.raises(KilnError, match="TensorRT failed to make a network: API Usage Error"):
        build_plan(made, profiles, TensorRtOptions(), tmp_path / "plan", kernels=kernels)
    log = (tmp_path / "plan" / "build.log").read_text()
    for layer in LAYERS:
        assert f"Global registry found {layer.name} creator" in log


def test_a_layer_of_another_kiln_is_refused_naming_both(model: OnnxModel, tmp_path: Path) -> None:
    made, _ = plugin_graph(model, tmp_path / "plugin.onnx", TARGET)
    proto = onnx.load(made.path)
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.name == "fields":
                attribute.s = replace(FIELDS, abi="0123456789abcdef").text.encode()
    onnx.save(proto, tmp_path / "other.onnx")
    with pytest.raises(KilnError, match=rf"ABI 0123456789ab, this Kiln has {abi_hash()[:12]}"):
        abi_of(tmp_path / "other.onnx")


def test_what_the_kernels_cannot_do_is_refused(model: OnnxModel, tmp_path: Path) -> None:
    assert model.decoder is not None
    with pytest.raises(KilnError, match=r"does not run on sm_75.*--attention native"):
        plugin_graph(model, tmp_path / "p.onnx", replace(TARGET, architecture="sm_75"))
    with pytest.raises(KilnError, match=r"head size of 80; expected one of 64, 96"):
        replace(KERNELS, head_dim=80)
    with pytest.raises(KilnError, match=r"no room for 30000 sequences.*--max-running"):
        replace(KERNELS, most_seqs=30000)
    odd = replace(model, decoder=replace(model.decoder, kv=replace(model.decoder.kv, block_size=8)))
    with pytest.raises(KilnError, match=r"blocks of 8 tokens; the attention plug-in takes multiples of 16"):
        plugin_graph(odd, tmp_path / "p.onnx", TARGET)
    with pytest.raises(KilnError, match="no serving graph"):
        plugin_graph(replace(model, decoder=None), tmp_path / "p.onnx", TARGET)
