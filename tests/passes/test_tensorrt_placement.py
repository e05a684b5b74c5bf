"""The rules about Q and D for TensorRT: each wrong place is found, named, and the right ones are left alone.

tests/engines/tensorrt asks a real builder whether it computes what the rules say.
"""

import re

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from passes.graph import graph_from_proto
from passes.quantization.tensorrt_placement import placement_faults, quantised_products, require_readable
from plugins.errors import KilnError

make = helper.make_node
CONSTANTS = {
    "s": np.array(0.05, np.float32),
    "s2": np.array(0.03, np.float32),
    "z": np.array(0, np.int8),
    "one": np.array(1, np.int8),
    "u": np.array(0, np.uint8),
    "w": np.ones((8, 8, 3, 3), np.int8),
    "m": np.ones((8, 8), np.int8),
    "ws": np.full(8, 0.01, np.float32),
    "wz": np.zeros(8, np.int8),
    "b": np.zeros(8, np.float32),
    "bi": np.zeros(8, np.int32),
    "biz": np.zeros(8, np.int32),
    "wf": np.ones((8, 8, 3, 3), np.float32),
    "half": np.array([4, 4], np.int64),
    **{f"i{number}": np.array(number, np.int64) for number in range(3)},
    "thirds": np.array([2, 2, 4], np.int64),
    "w8": np.ones((8, 8, 3, 3), ml_dtypes.float8_e4m3fn),
    "w8z": np.zeros(8, ml_dtypes.float8_e4m3fn),
}


def q(tensor: str, scale: str = "s", zero: str = "z", result: str = "") -> onnx.NodeProto:
    name = result or f"{tensor}_q"
    return make("QuantizeLinear", [tensor, scale, zero], [name], name)


def d(tensor: str, scale: str = "s", zero: str = "z", **attributes: int) -> onnx.NodeProto:
    return make("DequantizeLinear", [tensor, scale, zero], [f"{tensor}_d"], f"{tensor}_d", **attributes)


def conv(x: str, y: str, name: str, weight: str = "w_d") -> onnx.NodeProto:
    return make("Conv", [x, weight, "b"], [y], name, pads=[1, 1, 1, 1])


def model(*nodes: onnx.NodeProto, shape: tuple = ("n", 8, 6, 6)) -> onnx.ModelProto:
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(values, name) for name, values in CONSTANTS.items() if name in used],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=10)


ENTERS, WEIGHT = (q("x"), d("x_q")), d("w", "ws", "wz", axis=0)
FIRST = (*ENTERS, WEIGHT, conv("x_q_d", "c", "conv1"), make("Relu", ["c"], ["r"], "relu1"), q("r"), d("r_q"))
RIGHT = {
    "a chain": (*FIRST, conv("r_q_d", "y", "conv2")),
    "a residual": (*FIRST, conv("r_q_d", "c2", "conv2"), make("Add", ["c2", "x_q_d"], ["y"], "add")),
    "a pool between": (
        *ENTERS,
        WEIGHT,
        make("MaxPool", ["x_q_d"], ["p"], "pool", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        conv("p", "y", "conv1"),
    ),
    "no Q and D at all": (conv("x", "y", "conv1", "wf"),),
}
WRONG = {
    "stores uint8": ((q("x", zero="u"), d("x_q", zero="u"), WEIGHT, conv("x_q_d", "y", "conv1")), "x_q", "uint8"),
    "has a zero point": (
        (q("x", zero="one"), d("x_q", zero="one"), WEIGHT, conv("x_q_d", "y", "conv1")),
        "x_q",
        "zero point is not 0",
    ),
    "keeps a bias in int32": (
        (
            *ENTERS,
            WEIGHT,
            d("bi", "ws", "biz", axis=0),
            make("Conv", ["x_q_d", "w_d", "bi_d"], ["y"], "conv1", pads=[1, 1, 1, 1]),
        ),
        "bi_d",
        "a bias stays float",
    ),
    "has a float weight": ((*ENTERS, conv("x_q_d", "y", "conv1", "wf")), "conv1", "wf, does not come from Deq"),
    "has a float activation": ((WEIGHT, conv("x", "y", "conv1")), "conv1", "its activation, x, does not"),
    "has a Sigmoid in front": (
        (*ENTERS, WEIGHT, make("Sigmoid", ["x_q_d"], ["t"], "gate"), conv("t", "y", "conv1")),
        "conv1",
        r"gate \(Sigmoid\) stands between",
    ),
    "has scales along the wrong axis": (
        (*ENTERS, d("w", "ws", "wz", axis=1), conv("x_q_d", "y", "conv1")),
        "conv1",
        "along axis 1; give a scale to each output, along axis 0",
    ),
    "has a scale for each channel of its activation": (
        (
            make("QuantizeLinear", ["x", "ws", "wz"], ["x_q"], "x_q", axis=1),
            d("x_q", "ws", "wz", axis=1),
            WEIGHT,
            conv("x_q_d", "y", "conv1"),
        ),
        "conv1",
        "a scale for each channel",
    ),
    "multiplies int8 by FP8": (
        (*ENTERS, d("w8", "ws", "w8z", axis=0), conv("x_q_d", "y", "conv1", "w8_d")),
        "conv1",
        "multiplies int8 by float8_e4m3fn",
    ),
    "is quantised before its Relu": (
        (*ENTERS, WEIGHT, conv("x_q_d", "c", "conv1"), q("c"), d("c_q"), make("Relu", ["c_q_d"], ["y"], "relu1")),
        "conv1",
        "c_q .* stands between it and relu1; quantise behind relu1",
    ),
    "ends in an addition of a float": (
        (*FIRST, conv("r_q_d", "c2", "conv2"), make("Add", ["c2", "x"], ["y"], "add")),
        "conv2",
        "the other summand of add, x, is float",
    ),
    "is quantised before its addition": (
        (*FIRST, conv("r_q_d", "c2", "conv2"), q("c2"), d("c2_q"), make("Add", ["c2_q_d", "x_q_d"], ["y"], "add")),
        "conv2",
        "quantise behind add",
    ),
    "shares no Q with the other reader": (
        (
            *ENTERS,
            WEIGHT,
            q("x", "s2", "z", "other"),
            make("DequantizeLinear", ["other", "s2", "z"], ["other_d"], "other_d"),
            conv("x_q_d", "c1", "conv1"),
            conv("other_d", "c2", "conv2"),
            make("Mul", ["c1", "c2"], ["y"], "mul"),
        ),
        "other",
        "x is quantised 2 times, by x_q, other",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_places_are_left_alone(name: str) -> None:
    graph = graph_from_proto(model(*RIGHT[name]))
    assert placement_faults(graph) == []
    require_readable([])


@pytest.mark.parametrize("name", WRONG)
def test_a_product_that_is_named_because_it(name: str) -> None:
    nodes, node, reason = WRONG[name]
    faults = placement_faults(graph_from_proto(model(*nodes)))
    assert [fault.node for fault in faults if re.search(reason, fault.sentence())][:1] == [node]


def packed(sizes: str, *parts: str) -> tuple[onnx.NodeProto, ...]:
    return (
        *ENTERS,
        d("m", "ws", "wz", axis=1),
        make("MatMul", ["x_q_d", "m_d"], ["h"], "packed"),
        make("Add", ["h", "b"], ["hb"], "bias"),
        make("Split", ["hb", sizes], list(parts), "split", axis=-1),
        make("Mul", list(parts[:2]), ["y"], "mul"),
    )


def test_packed_queries_keys_and_values_are_named() -> None:
    assert placement_faults(graph_from_proto(model(*packed("half", "gate", "up"), shape=("n", 8)))) == []
    graph = graph_from_proto(model(*packed("thirds", "k", "q", "v"), shape=("n", 8)))
    (fault,) = placement_faults(graph)
    assert (fault.node, fault.fusion) == ("packed", "8-bit MatMul")
    assert [node.name for node in quantised_products(graph)] == ["packed"]
    assert fault.sentence().startswith("packed (MatMul): no 8-bit MatMul: split (Split) takes its result apart; keep")
    require_readable([fault])  # it costs time only


def test_queries_keys_and_values_in_slices_are_named() -> None:
    """As PP-OCR's reader has them."""
    nodes = [*packed("thirds", "k", "q", "v")[:-2], make("Transpose", ["hb"], ["t"], "turn", perm=[1, 0])]
    nodes += [
        make("Gather", ["t", index], [part], part, axis=0) for index, part in (("i0", "k"), ("i1", "q"), ("i2", "y"))
    ]
    (fault,) = placement_faults(graph_from_proto(model(*nodes, shape=("n", 8))))
    assert (fault.node, fault.reason) == ("packed", "k (Gather) takes its result apart")


def test_values_that_tensorrt_would_read_as_others_are_refused() -> None:
    faults = placement_faults(graph_from_proto(model(*WRONG["stores uint8"][0])))
    with pytest.raises(
        KilnError, match=r"reads other 8-bit values: x_q \(QuantizeLinear\): no 8-bit tensor: it stores uint8"
    ):
        require_readable(faults)


def test_quantised_products_are_those_with_both_operands_from_d() -> None:
    graph = graph_from_proto(model(*RIGHT["a residual"]))
    assert [node.name for node in quantised_products(graph)] == ["conv1", "conv2"]
    assert quantised_products(graph_from_proto(model(*WRONG["has a float weight"][0]))) == []
