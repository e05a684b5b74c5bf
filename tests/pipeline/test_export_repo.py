"""`kiln export-repo triton`: parsed with Triton's own definition, and run to see that it is what it says."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner
from google.protobuf import text_format
from onnx import numpy_helper

from engines.backends.tensorrt.key import EngineKey
from engines.backends.tensorrt.profiles import Profile, Sizes
from engines.bundle import EngineBundle, write_bundle
from engines.manifest import (
    BackendRecord,
    Manifest,
    PluginRecord,
    ServingRecord,
    TensorRecord,
    TensorRtRecord,
)
from passes.onnx_model import DecoderSpec, onnx_model_from_path
from pipeline.cli_export import export_repo_group
from pipeline.export_repo import export_triton
from pipeline.export_repo_config import TritonOptions, text_from_manifest
from pipeline.progress import Progress
from plugins.errors import KilnError
from plugins.paged_attention.schema import KvLayer, KvSpec
from tests.engines.gated_model import ENCODER, FIXED, MIXES_ROWS
from tests.manifests import manifest_of

WEIGHTED = "(float[n, 3] x) => (float[n, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, w) }"
NUMPY = {"TYPE_FP32": np.float32, "TYPE_INT64": np.int64}


@pytest.fixture(scope="session")
def triton() -> Any:
    """Triton's model_config_pb2 by its file: the package beside it wants gRPC."""
    spec = importlib.util.find_spec("tritonclient")
    if spec is None:
        pytest.skip("tritonclient is not installed")
    path = Path(spec.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MakeBundle = Callable[..., EngineBundle]


@pytest.fixture
def make_bundle(tmp_path: Path) -> MakeBundle:
    """A bundle around a graph in ONNX's text form, with its weights in a file of their own."""

    def make(graph: str, name: str = "model", **changes: Any) -> EngineBundle:
        def fill(folder: Path) -> Manifest:
            model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> agraph {graph}')
            for initializer in model.graph.initializer:  # as raw bytes, which alone may lie outside
                initializer.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(initializer), initializer.name))
            path = folder / "engine.onnx"
            onnx.save(model, path, save_as_external_data=True, location="engine.onnx.data", size_threshold=0)
            found = onnx_model_from_path(path)
            inputs, outputs = (tuple(map(TensorRecord.of, group)) for group in (found.inputs, found.outputs))
            if "engine" in changes:
                (folder / changes["engine"]).write_bytes(b"a plan")
            return manifest_of(folder, name, **{"inputs": inputs, "outputs": outputs, **changes})

        return write_bundle(tmp_path / "bundles" / name, fill)

    return make


def tuned(max_batch: int, knee: int) -> ServingRecord:
    return ServingRecord(
        max_batch=max_batch,
        objective="throughput",
        knee=knee,
        falls=True,
        workload="here",
        machine={},
        threads=3,
        measurements=(),
    )


def plan_of(batch: str = "n", weights: str | None = None) -> dict[str, Any]:
    """What makes a manifest one of a TensorRT plan for single items and batches of 2 to 8."""
    key = EngineKey(
        product="tensorrt",
        tensorrt="11.4.0",
        sku="l4",
        arch="sm_89",
        driver="580.95",
        plugin_abi=None,
        model_sha256="0" * 64,
        options="0" * 64,
        profiles="0" * 64,
        hardware="this",
        version_compatible=False,
    )
    profiles = (Profile("single", {batch: Sizes(1, 1, 1)}), Profile("batch", {batch: Sizes(2, 4, 8)}))
    record = TensorRtRecord(
        key=key, options={}, profiles=profiles, weights=weights, build_memory=0, build_memory_forecast=0
    )
    backend = BackendRecord(name="tensorrt", version="11.4.0", provider="TensorRT")
    return {"backend": backend, "engine": "engine.plan", "tensorrt": record}


def export(bundle: EngineBundle, out: Path, silent: Progress, name: str | None = None, **options: Any) -> Path:
    (model,) = export_triton([bundle.path], [name], out, TritonOptions(**options), silent)
    return model.folder


def config_of(folder: Path, triton: Any) -> Any:
    return text_format.Parse((folder / "config.pbtxt").read_text(), triton.ModelConfig())


def shape_of(tensor: Any, config: Any, batch: int, free: int) -> tuple[int, ...]:
    """What Triton gives to the model, or takes from it, by its configuration."""
    dims = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
    return (*([batch] if config.max_batch_size else []), *(free if size == -1 else size for size in dims))


def run_as_configured(folder: Path, config: Any, triton: Any, batch: int, free: int = 5) -> None:
    """Feed the newest version's model with what the configuration declares, and compare all that comes back."""
    import onnxruntime

    version = max(int(path.name) for path in folder.iterdir() if path.is_dir())
    session = onnxruntime.InferenceSession(str(folder / str(version) / config.default_model_filename))
    names = triton.DataType.Name
    feeds = {one.name: np.ones(shape_of(one, config, batch, free), NUMPY[names(one.data_type)]) for one in config.input}
    found = dict(zip((one.name for one in session.get_outputs()), session.run(None, feeds), strict=True))
    assert {one.name for one in config.output} == set(found)
    for one in config.output:
        assert found[one.name].dtype == NUMPY[names(one.data_type)]
        assert found[one.name].shape == shape_of(one, config, batch, free)


def test_the_model_is_what_its_configuration_says(
    triton: Any, make_bundle: MakeBundle, tmp_path: Path, silent: Progress
) -> None:
    folder = export(make_bundle(WEIGHTED, "weighted"), tmp_path / "repository", silent)
    assert sorted(path.name for path in (folder / "1").iterdir()) == ["engine.onnx.data", "model.onnx"]
    config = config_of(folder, triton)
    assert (config.name, config.backend, config.max_batch_size) == ("weighted", "onnxruntime", 16)
    assert config.dynamic_batching.max_queue_delay_microseconds == 2000
    assert [(group.kind, group.count) for group in config.instance_group] == [(triton.ModelInstanceGroup.KIND_CPU, 1)]
    assert config.parameters["intra_op_thread_count"].string_value == "0"
    run_as_configured(folder, config, triton, batch=7)


def test_outputs_without_dimensions_of_their_own_are_reshaped(
    triton: Any, make_bundle: MakeBundle, tmp_path: Path, silent: Progress
) -> None:
    folder = export(make_bundle(ENCODER), tmp_path / "repository", silent)
    config = config_of(folder, triton)
    pooled = next(one for one in config.output if one.name == "pooled")
    assert list(pooled.dims) == [1]
    assert pooled.HasField("reshape")
    run_as_configured(folder, config, triton, batch=3)


@pytest.mark.parametrize("graph", [MIXES_ROWS, FIXED])
def test_what_must_not_be_batched_is_not(
    graph: str, triton: Any, make_bundle: MakeBundle, tmp_path: Path, silent: Progress
) -> None:
    folder = export(make_bundle(graph), tmp_path / "repository", silent, max_batch=8)
    config = config_of(folder, triton)
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    run_as_configured(folder, config, triton, batch=1, free=1)


def test_batching_follows_the_serving_record_and_the_operator(
    triton: Any, make_bundle: MakeBundle, tmp_path: Path, silent: Progress
) -> None:
    bundle = make_bundle(WEIGHTED, serving=tuned(max_batch=32, knee=8))
    config = config_of(export(bundle, tmp_path / "a", silent), triton)
    assert (config.max_batch_size, list(config.dynamic_batching.preferred_batch_size)) == (32, [8])
    assert config.parameters["intra_op_thread_count"].string_value == "3"
    assert config.parameters["kiln.bundle"].string_value == bundle.sha256
    given = {"max_batch": 4, "queue_delay": 100, "instances": 2, "threads": 1}
    config = config_of(export(bundle, tmp_path / "b", silent, **given), triton)
    assert (config.max_batch_size, list(config.dynamic_batching.preferred_batch_size)) == (4, [])
    assert config.dynamic_batching.max_queue_delay_microseconds == 100
    assert config.instance_group[0].count == 2
    assert config.parameters["intra_op_thread_count"].string_value == "1"


def test_a_plan_gets_its_profiles_and_no_batch_beyond_them(
    triton: Any, make_bundle: MakeBundle, tmp_path: Path, silent: Progress
) -> None:
    bundle = make_bundle(WEIGHTED, serving=tuned(max_batch=32, knee=2), **plan_of())
    folder = export(bundle, tmp_path / "repository", silent)
    assert (folder / "1" / "model.plan").read_bytes() == b"a plan"
    assert not (folder / "1" / "model.onnx").exists()
    config = config_of(folder, triton)
    assert (config.backend, config.max_batch_size) == ("tensorrt", 8)
    assert list(config.dynamic_batching.preferred_batch_size) == [4]
    (group,) = config.instance_group
    assert (group.kind, list(group.profile)) == (triton.ModelInstanceGroup.KIND_GPU, ["0", "1"])
    assert "intra_op_thread_count" not in config.parameters
    with pytest.raises(KilnError, match=r"--max-batch is 9, but the plan .* batches of up to 8"):
        export(bundle, tmp_path / "other", silent, max_batch=9)


DECODER = DecoderSpec(KvSpec((KvLayer(1, 8),), 8, "float32"), 16, 64, (0,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder": DECODER}, "is a decoder.* keep nothing between requests.* kiln serve"),
        (plan_of(weights="model.onnx"), "without weights.* without --trt-strip-weights"),
        (
            {
                **plan_of(),
                "backend": BackendRecord(name="onnxruntime", version="1", provider="TensorrtExecutionProvider"),
            },
            "engine cache of TensorrtExecutionProvider.* --backend tensorrt",
        ),
        (
            {**plan_of(), "backend": BackendRecord(name="tensorrt_rtx", version="1", provider="TensorRT")},
            "plan of tensorrt_rtx",
        ),
    ],
)
def test_what_triton_cannot_serve_is_refused_before_anything_is_written(
    changes: dict[str, Any], message: str, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    good, bad = make_bundle(WEIGHTED, "good"), make_bundle(WEIGHTED, "bad", **changes)
    arguments = ["triton", str(good.path), str(bad.path), "--out", str(tmp_path / "repository")]
    result = CliRunner().invoke(export_repo_group, arguments)
    assert isinstance(result.exception, KilnError)
    with pytest.raises(KilnError, match=message):
        raise result.exception
    assert not (tmp_path / "repository").exists()


def test_versions_are_added_for_one_interface_only(
    triton: Any, make_bundle: MakeBundle, tmp_path: Path, silent: Progress
) -> None:
    out = tmp_path / "repository"
    export(make_bundle(WEIGHTED), out, silent)
    folder = export(make_bundle(WEIGHTED.replace("{1,", "{9,")), out, silent)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "config.pbtxt"]
    run_as_configured(folder, config_of(folder, triton), triton, batch=2)
    before = (folder / "config.pbtxt").read_bytes()
    with pytest.raises(KilnError, match="was not written for these inputs and outputs"):
        export(make_bundle(ENCODER), out, silent)
    assert (folder / "config.pbtxt").read_bytes() == before
    assert not (folder / "3").exists()


def test_names_are_folders_and_differ(make_bundle: MakeBundle, tmp_path: Path, silent: Progress) -> None:
    bundle = make_bundle(WEIGHTED)
    with pytest.raises(KilnError, match="no name for a folder"):
        export(bundle, tmp_path / "repository", silent, name="../other")
    with pytest.raises(KilnError, match="two bundles are called model"):
        export_triton([bundle.path] * 2, [None, None], tmp_path / "repository", TritonOptions(), silent)
    with pytest.raises(KilnError, match="instances is 0; expected at least 1"):
        TritonOptions(instances=0)
    assert not (tmp_path / "repository").exists()


def test_operator_libraries_are_named_where_the_server_sees_them(
    triton: Any, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    manifest = make_bundle(WEIGHTED).manifest
    plugin = PluginRecord(file="plugins/libkiln.so", operator="kiln::Int8MatMul", abi_hash="0" * 64)
    manifest = manifest.model_copy(update={"plugins": (plugin,)})
    options = TritonOptions(server_path="/srv/models/")
    text = text_from_manifest(manifest, "0" * 64, "m", 3, options, batches=True)
    config = text_format.Parse(text, triton.ModelConfig())
    assert list(config.model_operations.op_library_filename) == ["/srv/models/m/3/plugins/libkiln.so"]
