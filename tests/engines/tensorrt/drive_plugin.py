"""Asks TensorRT's own plug-in classes, in a process that has them, what they make of Kiln's layers.

Reads a request from standard input: `kernels`, `fields`, and for each layer its inputs' types and shapes. TensorRT's
builder calls the same methods in the same order; the expressions of sizes that it hands in are stood in for by numbers,
since a builder that takes plug-ins needs a GPU. Prints what it got as JSON.
"""

import json
import sys
from types import SimpleNamespace

import tensorrt as trt
import tensorrt.plugin as plugin
from tensorrt.plugin import _lib, _plugin_class, _tensor

from plugins.paged_attention import tensorrt_plugin

OPERATIONS = {
    trt.DimensionOperation.SUM: lambda a, b: a + b,
    trt.DimensionOperation.SUB: lambda a, b: a - b,
    trt.DimensionOperation.PROD: lambda a, b: a * b,
    trt.DimensionOperation.MAX: max,
    trt.DimensionOperation.MIN: min,
    trt.DimensionOperation.FLOOR_DIV: lambda a, b: a // b,
    trt.DimensionOperation.CEIL_DIV: lambda a, b: -(-a // b),
}


class Expression(trt.IDimensionExpr):
    """A number for an IDimensionExpr, which only C++ can make."""

    def is_constant(self):
        return True

    def get_constant_value(self):
        return self.number


def expression(number):
    made = Expression.__new__(Expression)
    made.number = number
    return made


class ExpressionBuilder:
    def constant(self, number):
        return expression(number)

    def operation(self, operation, first, second):
        return expression(OPERATIONS[operation](first.number, second.number))


class Symbols(list):
    nbSymExprs = 0  # noqa: N815 (TensorRT's name)

    def __setitem__(self, index, value):
        self.insert(index, value)


def ask(layer, request):
    """What the builder learns of one layer."""
    inputs = request["inputs"]
    types = [getattr(trt.DataType, kind) for kind, _ in inputs.values()]
    creator = _lib.QDP_CREATORS[f"{tensorrt_plugin.NAMESPACE}::{layer.name}"]
    assert creator is not None
    field = trt.PluginField("fields", request["fields"].encode(), trt.PluginFieldType.CHAR)
    made = _lib._TemplatePluginCreator(layer.name, tensorrt_plugin.NAMESPACE, {"fields": (True, str)}).create_plugin(
        layer.name,
        tensorrt_plugin.NAMESPACE,
        [field],
        trt.TensorRTPhase.BUILD,
        trt.QuickPluginCreationRequest.PREFER_AOT,
    )
    assert isinstance(made, _plugin_class._TemplateAOTPlugin)
    outputs = made.get_output_data_types(types, [len(shape) for _, shape in inputs.values()])
    sizes = [[expression(size) for size in shape] for _, shape in inputs.values()]
    shapes = made.get_output_shapes(sizes, [], ExpressionBuilder())
    described = [
        SimpleNamespace(desc=SimpleNamespace(type=kind, format=trt.TensorFormat.LINEAR, scale=1.0, dims=shape))
        for kind, shape in [*inputs.values(), *zip(outputs, [[e.number for e in s] for s in shapes], strict=True)]
    ]
    for one, kind in zip(described, [*types, *outputs], strict=True):
        one.desc.type = kind
    combination = made.get_supported_format_combinations(described, len(inputs))
    made.set_tactic(0)
    launch, integers = SimpleNamespace(), Symbols()
    made.get_launch_params(sizes, described, len(inputs), launch, integers, ExpressionBuilder())
    name, ptx = made.get_kernel([d.desc for d in described[: len(inputs)]], [d.desc for d in described[len(inputs) :]])
    return {
        "types": [str(kind).split(".")[-1] for kind in outputs],
        "shapes": [[size.number for size in shape] for shape in shapes],
        "aliases": [made.get_aliased_input(index) for index in range(len(outputs))],
        "linear": all(one.format == trt.TensorFormat.LINEAR for one in combination),
        "grid": [launch.grid_x, launch.grid_y, launch.grid_z],
        "threads": [launch.block_x, launch.block_y, launch.block_z],
        "shared_bytes": launch.shared_mem,
        "integers": list(integers),
        "count": integers.nbSymExprs,
        "kernel": name,
        "entry": f".entry {name}(".encode() in ptx,
    }


trt.DimsExprs = lambda count: [None] * count
_plugin_class.Shape = lambda described: tuple(described.desc.dims)
_tensor.SymExprImpl = lambda symbol: symbol._expr.number
request = json.load(sys.stdin)
tensorrt_plugin.register(plugin, tensorrt_plugin.Kernels(**request["kernels"]))
print(json.dumps({layer.name: ask(layer, request["layers"][layer.name]) for layer in tensorrt_plugin.LAYERS}))
