"""Every operator that is computed at build time gives what ONNX Runtime gives, in the opsets that changed it."""

from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from onnx import TensorProto as T
from onnx import helper

from passes.evaluate import OPERATORS, evaluate

RNG = np.random.default_rng(0)


def f(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def i(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def half(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16)


def s(value: float, dtype: Any = np.float32) -> np.ndarray:
    return np.array(value, dtype)


X, LAST = f(2, 3, 4), 2**63 - 1
POSITIVE = np.abs(X) + 0.1
SIGNED = (i(-7, 7, 5, -5), i(2, -2, 3, 3))
BITS = (X > 0, X < 0.5)

Case = tuple[int, tuple[np.ndarray | None, ...], dict[str, Any]]


def case(opset: int, *inputs: np.ndarray | None, **attributes: Any) -> Case:
    return opset, inputs, attributes


PLAIN = [case(13, X * 3), case(13, half(X))]
LOGICAL = [case(7, *BITS)]
UNARY = [case(13, POSITIVE), case(13, half(POSITIVE))]
COMPARE = [case(13, i(1, 2, 3), i(3, 2, 1)), case(16, X, f(3, 1))]
BINARY = [case(13, POSITIVE, f(3, 1)), case(13, *SIGNED), case(14, half(POSITIVE), half(f(3, 1)))]
MANY = [case(13, X, f(3, 1), f(4)), case(8, X, f(4))]
REDUCE = [
    case(11, X, axes=[1]),
    case(11, X, axes=[-1], keepdims=0),
    case(12, half(X), axes=[2]),
    case(13, i(3, 4, 5), keepdims=0),
    case(18, X, i(0, 2)),
    case(18, X, keepdims=0),
    case(18, X, noop_with_empty_axes=1),
    case(18, i(3, 4, 5), i(0), keepdims=0),
]
ARG = [case(13, X, axis=1), case(13, X, axis=-1, keepdims=0), case(12, i(1, 3, 3, 1), axis=0, select_last_index=1)]

CASES: dict[str, list[Case]] = {
    **dict.fromkeys(("Abs", "Ceil", "Floor", "Neg", "Relu", "Sign"), PLAIN),
    **dict.fromkeys(("Cos", "Erf", "Exp", "Log", "Reciprocal", "Sigmoid", "Sin", "Sqrt", "Tanh"), UNARY),
    **dict.fromkeys(("Add", "Div", "Mul", "Sub"), BINARY),
    **dict.fromkeys(("And", "Or", "Xor"), LOGICAL),
    **dict.fromkeys(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"), COMPARE),
    **dict.fromkeys(("Max", "Min", "Sum"), MANY),
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"), REDUCE),
    **dict.fromkeys(("ArgMax", "ArgMin"), ARG),
    "Cast": [case(13, POSITIVE * 3, to=to) for to in (T.FLOAT16, T.DOUBLE, T.INT64, T.INT32, T.BOOL, T.UINT8)]
    + [case(9, half(X), to=T.FLOAT), case(21, X > 0, to=T.FLOAT)],
    "CastLike": [case(15, X, i(1))],
    "Clip": [
        case(7, X, min=-0.5, max=0.2),
        case(10, X, min=-0.5),
        case(11, X, s(-0.5)),
        case(12, i(1, 5, 9), s(2, np.int64), s(6, np.int64)),
        case(13, X, None, s(0.5)),
        case(13, X, s(0.5), s(-0.5)),
    ],
    "Compress": [
        case(11, X, np.array([True, False, True]), axis=1),
        case(11, X, np.array([True, False, True])),
    ],
    "Concat": [case(7, X, f(2, 1, 4), axis=1), case(13, i(1), i(2, 3), axis=-1)],
    "ConstantOfShape": [
        case(9, i(2, 3)),
        case(9, i(2, 3), value=helper.make_tensor("v", T.INT64, [1], [7])),
        case(9, i(), value=helper.make_tensor("v", T.BOOL, [1], [True])),
    ],
    "CumSum": [
        case(11, X, s(1, np.int64)),
        case(11, X, s(-1, np.int32), reverse=1),
        case(14, i(1, 2, 3), s(0, np.int64), exclusive=1, reverse=1),
    ],
    "DepthToSpace": [case(13, f(1, 8, 2, 3), blocksize=2), case(11, f(1, 8, 2, 3), blocksize=2, mode="CRD")],
    "Einsum": [case(12, f(3), f(4), equation="i,j->ij"), case(12, X, f(2, 4, 3), equation="bij,bjk->bik")],
    "Expand": [case(13, f(3, 1), i(2, 1, 4)), case(8, f(3, 1), i(1, 1))],
    "EyeLike": [case(9, f(3, 4)), case(9, f(3, 4), k=1, dtype=T.INT64)],
    "Flatten": [case(13, X, axis=2), case(13, X, axis=-1), case(9, X, axis=0)],
    "Gather": [case(13, X, i(0, -1), axis=1), case(13, X, s(1, np.int64), axis=-1), case(7, i(4, 5), s(1, np.int64))],
    "GatherElements": [case(13, f(2, 2), np.array([[0, -1], [1, 0]]), axis=1)],
    "GatherND": [case(13, X, np.array([[0, 1], [1, 2]])), case(13, X, np.array([[1], [2]]), batch_dims=1)],
    "Gemm": [
        case(7, f(2, 3), f(3, 4), f(2, 1), beta=2.0),
        case(9, f(2, 3), f(3, 4), f(1, 4), alpha=0.3, beta=0.2),
        case(11, f(3, 2), f(4, 3), transA=1, transB=1, alpha=0.5),
    ],
    "Identity": [case(13, X)],
    "IsInf": [case(13, s([1, np.inf, -np.inf])), case(13, s([1, np.inf, -np.inf]), detect_negative=0)],
    "IsNaN": [case(13, s([1, np.nan]))],
    "MatMul": [case(13, X, f(4, 5)), case(13, half(X), half(f(4, 5))), case(9, f(4), f(4)), case(13, i(1, 2), i(3, 4))],
    "Mod": [case(13, *SIGNED), case(13, *SIGNED, fmod=1), case(13, X, f(1), fmod=1)],
    "NonZero": [case(13, X > 0)],
    "Not": [case(13, X > 0)],
    "OneHot": [
        case(11, i(0, -1, 2), s(3, np.int64), s([0, 1])),
        case(11, i(0, 2), s(4, np.int64), i(5, 6), axis=0),
    ],
    "Pad": [
        case(9, X, pads=[0, 1, 0, 0, 0, 1], mode="reflect"),
        case(10, X, pads=[0, 1, 0, 0, 0, 2], value=3.0),
        case(13, X, i(0, 1, 0, 0, 0, 2), s(2)),
        case(13, X, i(0, 1, 1, 0, 0, 2), mode="edge"),
        case(13, i(1, 2), i(1, 1)),
        case(18, X, i(1, 2), None, i(2), mode="reflect"),
        case(19, X, i(0, 0, 1, 0, 0, 1), mode="wrap"),
    ],
    "Pow": [
        case(7, POSITIVE, f(1)),
        case(13, POSITIVE, i(2)),
        case(13, i(2, 3), i(3, 2)),
        case(15, i(2, 3), s([0.5, 2])),
    ],
    "Range": [
        case(11, s(1, np.int64), s(9, np.int64), s(3, np.int64)),
        case(11, s(0), s(1), s(0.1)),
        case(11, s(5, np.int32), s(-1, np.int32), s(-2, np.int32)),
    ],
    "Reshape": [case(7, X, i(0, -1)), case(8, X, i(4, 0, -1)), case(14, f(0, 3), i(0, 3), allowzero=1)],
    "Round": [case(11, s([0.5, 1.5, 2.5, -0.5, -1.5]))],
    "ScatterElements": [
        case(13, X, np.array([[[0]]]), f(1, 1, 1), axis=1),
        case(18, X, np.array([[[0, 0]]]), f(1, 1, 2), axis=2, reduction="add"),
    ],
    "ScatterND": [
        case(13, X, np.array([[0, 1]]), f(1, 4)),
        case(16, X, np.array([[0, 1], [0, 1]]), f(2, 4), reduction="add"),
    ],
    "Shape": [case(13, X), case(15, X, start=1, end=-1)],
    "Size": [case(13, X)],
    "Slice": [
        case(9, X, starts=[0, -2], ends=[1, 2**31 - 1], axes=[0, 2]),
        case(9, X, starts=[1], ends=[100]),
        case(10, X, i(-1), i(-LAST), i(2), i(-1)),
        case(13, X, i(1, 0), i(LAST, 2), i(1, 2), i(1, 1)),
        case(13, X, i(3), i(0), i(-1), i(-2)),
        case(13, X, i(0), i(1)),
    ],
    "SpaceToDepth": [case(13, f(1, 2, 4, 4), blocksize=2)],
    "Split": [
        case(11, X, axis=1),
        case(11, X, axis=2, split=[1, 1, 2]),
        case(13, X, i(1, 1, 2), axis=-1),
        case(18, f(5), num_outputs=3),
    ],
    "Squeeze": [case(7, f(1, 3, 1)), case(11, f(1, 3, 1), axes=[0]), case(13, f(1, 3, 1), i(-1)), case(13, f(1, 3, 1))],
    "Tan": [case(13, X)],
    "Tile": [case(13, X, i(1, 2, 1))],
    "Transpose": [case(13, X, perm=[2, 0, 1]), case(13, X)],
    "Trilu": [case(14, X), case(14, X, s(-1, np.int64), upper=0), case(14, X, s(1, np.int64), upper=1)],
    "Unsqueeze": [case(9, X, axes=[1]), case(11, X, axes=[0, -1]), case(13, X, i(0, 2))],
    "Where": [case(13, X > 0, X, s(-1e9)), case(9, X > 0, half(X), half(f(1)))],
}


def model_of(op: str, opset: int, inputs: tuple[np.ndarray | None, ...], attributes: dict[str, Any]) -> onnx.ModelProto:
    names = ["" if values is None else f"i{index}" for index, values in enumerate(inputs)]
    outputs = [f"o{index}" for index in range(3 if op == "Split" else 1)]
    graph = helper.make_graph(
        [helper.make_node(op, names, outputs, **attributes)],
        "graph",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(values.dtype), values.shape)
            for name, values in zip(names, inputs, strict=True)
            if values is not None
        ],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


@pytest.mark.parametrize("op", sorted(OPERATORS))
def test_same_values_as_onnx_runtime(tools, op):
    for opset, inputs, attributes in CASES[op]:
        model = model_of(op, opset, inputs, attributes)
        feeds = {f"i{index}": values for index, values in enumerate(inputs) if values is not None}
        (node,) = gs.import_onnx(model).nodes
        node.domain = ""
        operands = [None if v is None else gs.Constant(f"c{index}", v) for index, v in enumerate(inputs)]
        found = evaluate(node, operands, opset)
        assert found is not None
        for values, expected in zip(found, tools.run(model, feeds), strict=True):
            assert values.dtype == expected.dtype
            tolerance = 1e-3 if values.dtype == np.float16 else 1e-6
            np.testing.assert_allclose(values, expected, rtol=tolerance, atol=tolerance, strict=True)


def test_the_size_is_judged_before_anything_is_read():
    (node,) = gs.import_onnx(model_of("Transpose", 17, (X,), {})).nodes
    node.domain = ""
    unread = gs.Constant("weight", X)
    unread._values = type("Unreadable", (), {"shape": (2**20, 2**10), "dtype": np.dtype(np.float32), "nbytes": 2**32})()
    assert evaluate(node, [unread], 17, limit=2**20) is None


@pytest.mark.parametrize("opset", [6, 17])
def test_old_opsets_are_left(opset):
    (node,) = gs.import_onnx(model_of("Neg", opset, (X,), {})).nodes
    node.domain = ""
    assert (evaluate(node, [gs.Constant("c", X)], opset) is None) == (opset < 7)
