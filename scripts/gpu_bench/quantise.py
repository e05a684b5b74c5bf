"""Weights of 8 or 4 bits for a serving graph on CUDA: its products get random ones, packed, whatever theirs were.

A random model has nothing to lose, so that quantising what it has would only take time. Layers that share their weights
on disk go on sharing them.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gpu_bench.widen import DEVIATION, external, random_values
from passes.quantization.cuda_schemes import DEFAULT_ROWS, FORMAT_OF, GROUP
from plugins.dense.schema import LINEAR, LINEAR_SWIGLU
from plugins.quant_matmul.cuda_choice import Choices
from plugins.quant_matmul.cuda_schema import FORMATS, QUANT_LINEAR, QUANT_LINEAR_SWIGLU, WeightFormat

if TYPE_CHECKING:
    import onnx

DATA = "quantised.data"
QUANTS: dict[str, WeightFormat] = {
    "int8": FORMAT_OF["w8a8-dynamic"],
    "fp8": FORMAT_OF["fp8"],
    "int4": FORMAT_OF["w4a16"],
}
"""What the benchmark's --quant names."""
_QUANTISED = {LINEAR.op_type: QUANT_LINEAR.op_type, LINEAR_SWIGLU.op_type: QUANT_LINEAR_SWIGLU.op_type}
_ALIGNMENT = 4096
_STEPS = {"int8": 127 / 4, "float8e4m3fn": 448 / 16, "int4": 7 / 2.5}
"""Stored numbers that one standard deviation of a weight takes: few are beyond the format's largest."""


def quantise(model: "onnx.ModelProto", form: WeightFormat, choices: Choices | None, folder: Path) -> int:
    """Give all products of a graph weights of a format, in place, in a file in `folder`; returns how many there are.

    `choices` says for each shape up to how many rows the kernels take; without them it is the default.
    """
    import onnx

    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    written: dict[object, tuple[onnx.TensorProto, onnx.TensorProto]] = {}
    generator, count = np.random.default_rng(0), 0
    with (folder / DATA).open("wb") as file:
        for node in graph.node:
            if node.domain != LINEAR.domain or node.op_type not in _QUANTISED:
                continue
            old = weights[node.input[1]]
            place = tuple((entry.key, entry.value) for entry in old.external_data) or old.name
            if place not in written:
                written[place] = _stored(file, list(old.dims), form, generator)
            for tensor, name in zip(written[place], ("packed", "scale"), strict=True):
                copy = graph.initializer.add()
                copy.CopyFrom(tensor)
                copy.name = f"{old.name}/{name}"
            node.input[1:2] = [f"{old.name}/packed", f"{old.name}/scale"]
            rows = _kernel_rows(node.op_type == LINEAR_SWIGLU.op_type, list(old.dims), form, choices)
            node.op_type = _QUANTISED[node.op_type]
            attributes = {"format": FORMATS.index(form), "group_size": _group(form), "kernel_rows": rows}
            del node.attribute[:]
            node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in attributes.items())
            count += 1
    used = {name for node in graph.node for name in node.input}
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in used]:
        graph.initializer.remove(tensor)
    return count


def random_bytes(form: WeightFormat, count: int, generator: np.random.Generator) -> Iterator[NDArray[np.uint8]]:
    """So many packed weights, in pieces that repeat: normal ones, `_STEPS` of the format a standard deviation."""
    for values in random_values(count, np.float32, generator):
        units = values * np.float32(_STEPS[form] / DEVIATION)
        if form == "float8e4m3fn":
            yield np.clip(units, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        elif form == "int8":
            yield np.clip(np.rint(units), -127, 127).astype(np.int8).view(np.uint8)
        else:
            nibbles = (np.clip(np.rint(units), -7, 7) + 8).astype(np.uint8)
            yield nibbles[: len(nibbles) // 2 * 2 : 2] | nibbles[1::2] << 4


def _stored(
    file: Any, dims: list[int], form: WeightFormat, generator: np.random.Generator
) -> "tuple[onnx.TensorProto, onnx.TensorProto]":
    """Weight and scales for [width, depth], appended to a file."""
    import onnx

    width, depth = dims
    per_byte = 2 if form == "int4" else 1
    start = _aligned(file)
    for piece in random_bytes(form, width * depth, generator):
        file.write(piece.tobytes())
    file.write(bytes(start + width * depth // per_byte - file.tell()))  # where a piece was odd
    packed = external(onnx.TensorProto.UINT8, [width, depth // per_byte], DATA, start, width * depth // per_byte)
    groups = math.ceil(depth / _group(form)) if _group(form) else 1
    scales = np.full((groups, width), DEVIATION / _STEPS[form], np.float32)
    start = _aligned(file)
    file.write(scales.tobytes())
    return packed, external(onnx.TensorProto.FLOAT, [groups, width], DATA, start, scales.nbytes)


def _aligned(file: Any) -> int:
    file.write(bytes(-file.tell() % _ALIGNMENT))
    return int(file.tell())


def _group(form: WeightFormat) -> int:
    return GROUP if form == "int4" else 0


def _kernel_rows(gated: bool, dims: list[int], form: WeightFormat, choices: Choices | None) -> int:
    width = dims[0] // 2 if gated else dims[0]
    shape = (width, dims[1], gated)
    for one in choices.measured if choices else ():
        if (one.width, one.depth, one.swiglu) == shape:
            assert choices is not None
            return choices.fastest_rows(one.layer, form)
    return DEFAULT_ROWS
