"""Compares channels-first with channels-last on ONNX Runtime's CPU provider, in FP32 and INT8: a table, one JSON line.

    python scripts/bench_layout.py MODEL.onnx [--threads 2] [--rounds 15] [--batch 1]

MODEL has one image input `[N, C, H, W]`. It is quantised with ONNX Runtime's static quantiser, on random images: good
for speed, not for accuracy. All sessions alternate, so that a busy machine slows them alike; times are the best of all
rounds. The FP32 channels-last form spells 1x1 convolutions as MatMul over `[N, H, W, C]`, because there is no kernel
for an FP32 channels-last convolution (the script lists those there are); other convolutions stand between Transposes.
Fails when INT8 outputs of the two layouts differ in a single bit.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
from numpy.typing import NDArray
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from passes.fuse_qdq import FuseQdq
from passes.graph import graph_from_path, proto_from_graph, tidy
from passes.io_layout import IoLayoutNhwc
from passes.layout_nhwc import LayoutNhwc
from passes.nhwc_forms import TO_NCHW, TO_NHWC
from passes.pattern import STANDARD, new_constant, new_variable, replace_node, take_outputs, values_of
from passes.scopes import scopes
from passes.shapes import infer_shapes
from passes.weights import consolidate


@dataclass
class Candidate:
    name: str
    session: ort.InferenceSession
    feeds: dict[str, NDArray]
    load: float
    """Seconds to make the session."""
    transposes: int
    """That remain after ONNX Runtime's own rewrites."""
    best: float = float("inf")


class RandomImages(CalibrationDataReader):
    def __init__(self, name: str, shape: list[int]) -> None:
        rng = np.random.default_rng(0)
        self.images = iter([{name: rng.standard_normal(shape, dtype=np.float32)} for _ in range(4)])

    def get_next(self) -> dict[str, NDArray] | None:
        return next(self.images, None)


def float_nhwc_kernels() -> list[str]:
    """Convolution kernels of the CPU provider for channels-last tensors of floats."""
    return [
        f"{kernel.domain}::{kernel.op_name} {kernel.type_constraints}"
        for kernel in get_all_opkernel_def()
        if kernel.provider == "CPUExecutionProvider" and kernel.op_name in ("NhwcConv", "NhwcFusedConv")
    ]


def spell_pointwise_as_matmul(graph: gs.Graph) -> None:
    """`Conv(x; 1x1)` -> `Transpose, MatMul, Add, Transpose`; ONNX Runtime moves and cancels the Transposes itself."""
    for scope in scopes(graph):
        for conv in [node for node in scope.nodes if node.op == "Conv"]:
            weights = values_of(conv.inputs[1])
            plain = conv.attrs.get("group", 1) == 1 and not any(conv.attrs.get("pads", [0]))
            if (
                weights is None
                or weights.shape[2:] != (1, 1)
                or set(conv.attrs.get("strides", [1])) != {1}
                or not plain
            ):
                continue
            source, (target,) = conv.inputs[0], take_outputs(conv)
            inner = [new_variable(target, f"nhwc{step}") for step in range(3)]
            matrix = new_constant(target, "matrix", weights[:, :, 0, 0].T)
            nodes = [
                gs.Node("Transpose", "", {"perm": list(TO_NHWC)}, [source], [inner[0]], domain=STANDARD),
                gs.Node("MatMul", "", {}, [inner[0], matrix], [inner[1]], domain=STANDARD),
                gs.Node("Add", "", {}, [inner[1], conv.inputs[2]], [inner[2]], domain=STANDARD),
                gs.Node("Transpose", "", {"perm": list(TO_NCHW)}, [inner[2]], [target], domain=STANDARD),
            ]
            if len(conv.inputs) < 3:
                nodes[1].outputs, nodes[2:3] = [inner[2]], []
            replace_node(scope, conv, *nodes)


def rewritten(source: Path, target: Path, *steps: object) -> Path:
    graph = graph_from_path(source)
    for step in steps:
        infer_shapes(graph)
        step.call(graph) if hasattr(step, "call") else step(graph)
        tidy(graph)
    consolidate(graph, target.with_suffix(".data"))
    onnx.save(proto_from_graph(graph), target)
    return target


def candidate(
    name: str, path: Path, image: NDArray, threads: int, folder: Path, disabled: tuple[str, ...] = ()
) -> Candidate:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.add_session_config_entry("session.force_spinning_stop", "1")  # idle sessions must not take the cores
    started = time.perf_counter()
    session = ort.InferenceSession(str(path), options, ["CPUExecutionProvider"], disabled_optimizers=list(disabled))
    load = time.perf_counter() - started
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    ort.InferenceSession(str(path), options, ["CPUExecutionProvider"], disabled_optimizers=list(disabled))
    ops = Counter(node.op_type for node in onnx.load(folder / "optimised.onnx", load_external_data=False).graph.node)
    feeds = {session.get_inputs()[0].name: image}
    return Candidate(name, session, feeds, load, ops["Transpose"] + ops["ReorderInput"] + ops["ReorderOutput"])


def candidates(model: Path, folder: Path, threads: int, batch: int) -> list[Candidate]:
    declared = onnx.load(model, load_external_data=False).graph.input[0]
    dims = [dim.dim_value or batch for dim in declared.type.tensor_type.shape.dim]
    image = np.random.default_rng(1).standard_normal(dims, dtype=np.float32)
    nhwc_image = np.ascontiguousarray(image.transpose(TO_NHWC))
    found = []

    def add(name: str, path: Path, fed: NDArray = image, disabled: tuple[str, ...] = ()) -> None:
        found.append(candidate(name, path, fed, threads, folder, disabled))

    add("FP32 NCHW", model)
    add("FP32 NCHW, no NCHWc blocking", model, disabled=("NchwcTransformer",))
    matmul = rewritten(model, folder / "matmul.onnx", spell_pointwise_as_matmul)
    add("FP32 NHWC, 1x1 as MatMul", matmul)
    add("FP32 NHWC, 1x1 as MatMul, no blocking", matmul, disabled=("NchwcTransformer",))
    for kind, quant_format in (("operators", QuantFormat.QOperator), ("Q/DQ", QuantFormat.QDQ)):
        path = folder / f"{quant_format.name}.onnx"
        quantize_static(
            str(model),
            str(path),
            RandomImages(declared.name, [1, *dims[1:]]),
            quant_format=quant_format,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        layout = (FuseQdq(), LayoutNhwc("cpu-int8"))
        add(f"INT8 {kind}, NCHW", path)
        add(f"INT8 {kind}, NCHW, no NhwcTransformer", path, disabled=("NhwcTransformer",))
        add(f"INT8 {kind}, layout_nhwc", rewritten(path, folder / f"{quant_format.name}-a.onnx", *layout))
        with_io = rewritten(path, folder / f"{quant_format.name}-b.onnx", IoLayoutNhwc(), *layout)
        add(f"INT8 {kind}, layout_nhwc, NHWC input", with_io, nhwc_image)
    return found


def check_bits(found: list[Candidate]) -> None:
    """Raise SystemExit where two INT8 candidates of one kind differ."""
    for kind in ("INT8 operators", "INT8 Q/DQ"):
        same = [each for each in found if each.name.startswith(kind)]
        outputs = [each.session.run(None, each.feeds)[0] for each in same]
        for each, output in zip(same, outputs, strict=True):
            if not np.array_equal(output, outputs[0]):
                raise SystemExit(f"'{each.name}' gives other bits than '{same[0].name}'")


def measure(found: list[Candidate], rounds: int) -> None:
    for _ in range(rounds):
        for each in found:
            for _ in range(3):
                started = time.perf_counter()
                each.session.run(None, each.feeds)
                each.best = min(each.best, time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=1, help="where the model leaves it open")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = candidates(arguments.model, Path(name), arguments.threads, arguments.batch)
        check_bits(found)
        measure(found, arguments.rounds)
    kernels = float_nhwc_kernels()
    print(f"{arguments.model}, batch {arguments.batch}, {arguments.threads} threads, ONNX Runtime {ort.__version__}")
    print(f"FP32 channels-last convolution kernels of the CPU provider: {', '.join(kernels) or 'none'}")
    print(f"{'graph':<42}{'ms':>8}{'of FP32':>9}{'load s':>8}{'reorders':>10}")
    for each in found:
        share = each.best / found[0].best
        print(f"{each.name:<42}{each.best * 1e3:>8.2f}{share:>9.2f}{each.load:>8.2f}{each.transposes:>10}")
    milliseconds = {each.name: round(each.best * 1e3, 3) for each in found}
    print(json.dumps({"threads": arguments.threads, "batch": arguments.batch, "ms": milliseconds, "kernels": kernels}))


if __name__ == "__main__":
    main()
