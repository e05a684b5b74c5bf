"""Measures what `prefer_nhwc` of ONNX Runtime's CUDA provider gains on a convolutional model: a table, one JSON line.

    python scripts/bench_nhwc_cuda.py MODEL.onnx [--batches 1,8,32] [--rounds 20] [--calls 20]

Needs numpy, onnx and onnxruntime-gpu only. MODEL has one FP32 image input `[N, C, H, W]` with an open or matching
batch; the FP16 form is made here (weights, inputs and outputs; casts to FP32 inside become casts to FP16). Inputs and
outputs stay on the device; CUDA graphs are off; all settings of a batch alternate. Times are the best round's mean over
its calls. The last columns compare outputs with FP32 NCHW: max|difference| / max|output|, for NCHW and NHWC. FP32
convolutions may run in TF32 there, in both layouts.
"""

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, numpy_helper


@dataclass
class Setting:
    dtype: str
    prefer_nhwc: bool
    session: ort.InferenceSession
    binding: ort.IOBinding
    best: float = float("inf")

    @property
    def output(self) -> np.ndarray:
        return self.binding.copy_outputs_to_cpu()[0].astype(np.float32)


def half_from_float(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model on FP16. Values beyond FP16's range saturate; scales of Resize, which must be FP32, stay."""
    half = onnx.ModelProto()
    half.CopyFrom(model)
    graph = half.graph
    kept = {name for node in graph.node if node.op_type in ("Resize", "Upsample") for name in node.input[1:] if name}
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and tensor.name not in kept:
            tensor.CopyFrom(_half_tensor(tensor))
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g") or attribute.graphs:
                raise SystemExit(f"node '{node.name}' ({node.op_type}) holds a subgraph, which is not converted here")
            is_float = attribute.t.data_type == TensorProto.FLOAT
            if node.op_type in ("Constant", "ConstantOfShape") and is_float and not set(node.output) & kept:
                attribute.t.CopyFrom(_half_tensor(attribute.t))
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
    return half


def _half_tensor(tensor: onnx.TensorProto) -> onnx.TensorProto:
    limit = np.finfo(np.float16).max
    values = np.clip(numpy_helper.to_array(tensor), -limit, limit).astype(np.float16)
    return numpy_helper.from_array(values, tensor.name)


def setting(path: Path, dtype: str, prefer_nhwc: bool, image: np.ndarray) -> Setting:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    provider = {"device_id": "0", "prefer_nhwc": str(int(prefer_nhwc)), "enable_cuda_graph": "0"}
    session = ort.InferenceSession(str(path), options, [("CUDAExecutionProvider", provider), "CPUExecutionProvider"])
    if "CUDAExecutionProvider" not in session.get_providers():
        raise SystemExit("the CUDA provider did not load; install onnxruntime-gpu and its CUDA and cuDNN libraries")
    binding = session.io_binding()
    fed = image.astype(np.float16 if dtype == "FP16" else np.float32)
    binding.bind_ortvalue_input(session.get_inputs()[0].name, ort.OrtValue.ortvalue_from_numpy(fed, "cuda", 0))
    for output in session.get_outputs():
        binding.bind_output(output.name, "cuda", 0)
    return Setting(dtype, prefer_nhwc, session, binding)


def measure(settings: list[Setting], rounds: int, calls: int) -> None:
    """A call returns when its work on the device is done, so wall time is the model's latency."""
    for each in settings:
        for _ in range(10):  # chooses cuDNN's algorithms, fills the memory pool
            each.session.run_with_iobinding(each.binding)
    for _ in range(rounds):
        for each in settings:
            started = time.perf_counter()
            for _ in range(calls):
                each.session.run_with_iobinding(each.binding)
            each.best = min(each.best, (time.perf_counter() - started) / calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=20)
    arguments = parser.parse_args()
    ort.preload_dlls()  # CUDA and cuDNN from Python packages, where there are any
    model = onnx.load(arguments.model)
    dims = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        paths = {"FP32": Path(folder) / "fp32.onnx", "FP16": Path(folder) / "fp16.onnx"}
        onnx.save(half_from_float(model), paths["FP16"])
        onnx.save(model, paths["FP32"])
        print(f"{arguments.model.name}, ONNX Runtime {ort.__version__}, {arguments.rounds} x {arguments.calls} calls")
        print(
            f"{'batch':>5} {'type':<5}{'NCHW ms':>9}{'NHWC ms':>9}{'gain':>7}{'images/s':>10}{'error':>10}{'and':>10}"
        )
        for batch in map(int, arguments.batches.split(",")):
            image = np.random.default_rng(0).standard_normal((batch, *dims[1:]), dtype=np.float32)
            settings = [setting(paths[d], d, nhwc, image) for d in ("FP32", "FP16") for nhwc in (False, True)]
            measure(settings, arguments.rounds, arguments.calls)
            reference = settings[0].output
            errors = [float(np.abs(each.output - reference).max() / np.abs(reference).max()) for each in settings]
            for index in (0, 2):
                nchw, nhwc = settings[index : index + 2]
                times = f"{nchw.best * 1e3:>9.3f}{nhwc.best * 1e3:>9.3f}{nchw.best / nhwc.best:>6.2f}x"
                rate = batch / min(nchw.best, nhwc.best)
                print(f"{batch:>5} {nchw.dtype:<5}{times}{rate:>10.0f}{errors[index]:>10.1e}{errors[index + 1]:>10.1e}")
            rows += [
                {
                    "batch": batch,
                    "dtype": each.dtype,
                    "prefer_nhwc": each.prefer_nhwc,
                    "ms": round(each.best * 1e3, 4),
                    "error": error,
                }
                for each, error in zip(settings, errors, strict=True)
            ]
    print(json.dumps({"onnxruntime": ort.__version__, "results": rows}))


if __name__ == "__main__":
    main()
