"""Networks as TensorRT gets them: after the passes for it, in FP32, in FP16, and in INT8 with Q and D.

Ranges for INT8 are those of one run of the float graph, which is enough to judge where Q and D stand, not accuracy.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
from numpy.typing import NDArray

from passes.cast_precision import CastPrecision
from passes.graph import graph_from_path, proto_from_graph, tidy
from passes.manager import run_passes
from passes.onnx_model import OnnxModel, onnx_model_from_path
from passes.quantization.insert_qdq import InsertQdq
from passes.quantization.layers import layers_of, name_layers
from passes.quantization.plan import LayerPlan, PrecisionPlan
from passes.quantization.support import supported_schemes
from passes.quantization.table import CalibrationTable, Range, TensorStatistics
from passes.shapes import infer_shapes
from passes.standard import BINDING_TABLE, FLOAT_TABLE, PassTarget, standard_passes
from plugins.paged_attention.schema import OP_TYPE

PRECISIONS = ("fp32", "fp16", "int8", "int8-fp16")


def prepared(
    model: OnnxModel, folder: Path, precision: str, sizes: Mapping[str, int] = MappingProxyType({})
) -> OnnxModel:
    """`model` as a build for TensorRT makes it, without the numeric gate: that is tested elsewhere.

    `sizes` are those of symbols for which not any size does.
    """
    target = PassTarget(backend="tensorrt", decoder=model.decoder, precision="fp32")
    path = folder / f"{model.path.stem}-{precision}.onnx"
    floats, _ = run_passes(model, folder / "float" / path.name, standard_passes(target, table=FLOAT_TABLE))
    if floats.decoder is not None:
        floats = cut_at_attention(floats.path, floats.path.with_name("cut.onnx"))
    passes = standard_passes(target, table=BINDING_TABLE)
    if precision.endswith("fp16"):
        magnitudes = {name: s.range.magnitude for name, s in ranges(floats, sizes).items()}
        passes = [CastPrecision("float16", magnitudes), *passes]
    if precision.startswith("int8"):
        passes = [insert_qdq(floats, sizes), *passes]
    return run_passes(floats, path, passes)[0]


def insert_qdq(model: OnnxModel, sizes: Mapping[str, int]) -> InsertQdq:
    """Every layer as w8a8 but the first and the last, as `build-engine --quant int8` plans it."""
    graph = graph_from_path(model.path)
    name_layers(graph)
    layers = layers_of(graph)
    chosen = [layer for layer in layers[1:-1] if "w8a8" in supported_schemes(layer, "tensorrt")]
    plan = PrecisionPlan("m", {layer.name: LayerPlan("w8a8") for layer in chosen})
    return InsertQdq(plan, CalibrationTable("m", "d", "minmax", True, ranges(model, sizes), {}), "tensorrt")


def ranges(model: OnnxModel, sizes: Mapping[str, int]) -> dict[str, TensorStatistics]:
    """Of every float tensor that one run computes."""
    proto = onnx.load(model.path, load_external_data=False)
    known = {value.name for value in proto.graph.output}
    names = [name for node in proto.graph.node for name in node.output if name and name not in known]
    proto.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(model.path.parent))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = random_feeds(model, sizes)
    values = {
        **dict(zip([o.name for o in session.get_outputs()], session.run(None, dict(feeds)), strict=True)),
        **feeds,
    }
    return {
        name: TensorStatistics(Range(float(value.min()), float(value.max())), {})
        for name, value in values.items()
        if value.dtype == np.float32 and value.size
    }


def cut_at_attention(path: Path, target: Path) -> OnnxModel:
    """A decoder without its attention: queries, keys and values are outputs, what attention gives is an input.

    TensorRT has no importer for the operator; everything around it is what this form shows.
    """
    graph = graph_from_path(path)
    infer_shapes(graph)
    cut = [node for node in graph.nodes if node.op == OP_TYPE]
    for number, node in enumerate(cut):
        width = node.attrs["num_heads"] * head_dim_of(node)
        given = gs.Variable(f"attention.{number}", np.float32, ["tokens", width])
        graph.inputs.append(given)
        for reader in list(node.outputs[0].outputs):
            reader.inputs[[read is node.outputs[0] for read in reader.inputs].index(True)] = given
        graph.outputs += [tensor for tensor in node.inputs[:3] if isinstance(tensor, gs.Variable)]
        node.outputs.clear()
        node.inputs.clear()
    gone = {id(node) for node in cut}
    graph.nodes = [node for node in graph.nodes if id(node) not in gone]
    graph.outputs = list({id(t): t for t in graph.outputs if t.inputs or t in graph.inputs}.values())
    tidy(graph)
    read = {id(tensor) for node in graph.nodes for tensor in node.inputs}
    graph.inputs = [tensor for tensor in graph.inputs if id(tensor) in read]
    proto = proto_from_graph(graph)
    del proto.metadata_props[:]
    target.write_bytes(proto.SerializeToString())  # weights stay in the file that they are in, beside it
    return onnx_model_from_path(target)


def head_dim_of(node: gs.Node) -> int:
    return int(node.inputs[3].shape[-1])


def random_feeds(model: OnnxModel, sizes: Mapping[str, int], size: int = 8) -> dict[str, NDArray]:
    """Other symbols are `size`, ids are below it, floats come from a normal distribution."""
    rng = np.random.default_rng(0)
    feeds = {}
    for tensor in model.inputs:
        shape = [sizes.get(known, size) if isinstance(known, str) else known for known in tensor.shape]
        if np.dtype(tensor.dtype).kind == "f":
            feeds[tensor.name] = rng.standard_normal(shape).astype(tensor.dtype)
        elif tensor.name == "attention_mask":
            feeds[tensor.name] = np.ones(shape, tensor.dtype)
        else:
            feeds[tensor.name] = rng.integers(0, 2 if "type" in tensor.name else size, shape).astype(tensor.dtype)
    return feeds
