"""What a graph says of its operators that a profile's shapes do not: windows of attention, formats of weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from passes.onnx_model import DecoderSpec, load_structure
from pipeline.floors import decoder_work_from_graph
from pipeline.operator_work import LowBitProduct
from plugins.quant_matmul.cuda_schema import EQUAL_ROWS, FORMATS, QUANT_LINEAR, QUANT_LINEAR_SWIGLU

_LOW_BIT = (QUANT_LINEAR.op_type, QUANT_LINEAR_SWIGLU.op_type)


@dataclass(frozen=True)
class GraphFacts:
    """`windows` of the attention layers in their order, None: to the first token; `low_bit` goes by a node's name."""

    windows: tuple[int | None, ...] = ()
    low_bit: Mapping[str, LowBitProduct] = field(default_factory=dict)


def facts_of_decoder(path: Path, decoder: DecoderSpec) -> GraphFacts:
    """Of a serving graph."""
    layers = decoder_work_from_graph(path, decoder).layers
    products = {}
    for node in load_structure(path).graph.node:
        if node.op_type in _LOW_BIT:
            given = {attribute.name: attribute.i for attribute in node.attribute}
            products[node.name] = LowBitProduct(FORMATS[given["format"]], given.get("kernel_rows", EQUAL_ROWS))
    return GraphFacts(tuple(layer.window for layer in layers), products)
