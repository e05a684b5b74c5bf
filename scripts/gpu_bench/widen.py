"""A larger vocabulary for a serving graph: new random values for every tensor that has a row or column for each token.

Building a model with all of its tokens takes as long again as building its layers, and no pass looks at them.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike, NDArray

from passes.onnx_model import DECODER_METADATA, DecoderSpec
from plugins.errors import KilnError

if TYPE_CHECKING:
    import onnx

DATA = "vocabulary.data"
DEVIATION = 0.02
"""Of random weights."""
_DRAWN = (1 << 22) + 1
"""Values drawn for a tensor, which repeats them: all would take a minute. Odd, so that no two rows are alike."""
_ALIGNMENT = 4096


def widen(model: "onnx.ModelProto", decoder: DecoderSpec, vocabulary: int, folder: Path) -> DecoderSpec:
    """Give a graph so many tokens, in place, with the values in a file in `folder`; gives its new description.

    Raises KilnError where a constant of the graph is the number of tokens: what depends on it is not known.
    """
    import onnx

    graph, old = model.graph, decoder.vocab_size
    for tensor in graph.initializer:
        is_shape = tensor.data_type == onnx.TensorProto.INT64 and math.prod(tensor.dims) < 100
        if is_shape and old in onnx.numpy_helper.to_array(tensor):
            raise KilnError(f"the constant {tensor.name} holds {old}, the number of tokens; it cannot be changed")
    generator = np.random.default_rng(0)
    with (folder / DATA).open("wb") as file:
        for tensor in graph.initializer:
            if old in tensor.dims:
                dims = [vocabulary if size == old else size for size in tensor.dims]
                file.write(bytes(-file.tell() % _ALIGNMENT))
                start = file.tell()
                dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
                for part in random_values(math.prod(dims), dtype, generator):
                    file.write(part.tobytes())
                made = external(tensor.data_type, dims, DATA, start, file.tell() - start)
                made.name = tensor.name
                tensor.CopyFrom(made)
    for value in (*graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value == old:
                dim.dim_value = vocabulary
    wider = replace(decoder, vocab_size=vocabulary)
    for entry in model.metadata_props:
        if entry.key == DECODER_METADATA:
            entry.value = wider.to_json()
    return wider


def random_values(count: int, dtype: DTypeLike, generator: np.random.Generator) -> Iterator[NDArray]:
    """So many normal values, or whole ones of an integer type, in pieces that repeat."""
    kind = np.dtype(dtype)
    drawn = min(count, _DRAWN)
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        piece = generator.integers(limits.min, limits.max, drawn, kind, endpoint=True)
    else:
        piece = (generator.standard_normal(drawn, np.float32) * np.float32(DEVIATION)).astype(kind)
    for start in range(0, count, drawn):
        yield piece[: count - start]


def external(kind: int, dims: list[int], location: str, offset: int, length: int) -> "onnx.TensorProto":
    """A tensor without a name whose bytes lie in a file beside the graph."""
    import onnx

    made = onnx.TensorProto(data_type=kind, dims=dims)
    made.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        made.external_data.add(key=key, value=str(value))
    return made
