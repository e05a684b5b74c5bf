"""Rotations in the spellings of exporters, for tests: texts of nodes from x [.., 8] and `ids` to y."""

from dataclasses import dataclass

import numpy as np
import onnx
import onnx.parser
from numpy.typing import NDArray
from onnx import numpy_helper

POSITIONS, SIZE = 32, 8

CONSTANTS = """
c0 = Constant<value_ints=[0]>()
c1 = Constant<value_ints=[1]>()
c2 = Constant<value_ints=[2]>()
c3 = Constant<value_ints=[3]>()
c4 = Constant<value_ints=[4]>()
last = Constant<value_ints=[-1]>()
end = Constant<value_ints=[9223372036854775807]>()
halves = Constant<value_ints=[4, 4]>()
pairs = Constant<value_ints=[0, 0, 0, 4, 2]>()
flat = Constant<value_ints=[0, 0, 0, 8]>()
flat4 = Constant<value_ints=[0, 0, 0, 4]>()
twice = Constant<value_ints=[1, 1, 1, 1, 2]>()
i0 = Constant<value_int=0>()
i1 = Constant<value_int=1>()
minus = Constant<value_float=-1.0>()
"""
LOOK_UP = """
cos_rows = Gather<axis=0>(cos_table, ids)
sin_rows = Gather<axis=0>(sin_table, ids)
cos = Unsqueeze(cos_rows, c1)
sin = Unsqueeze(sin_rows, c1)
"""
"""Rows of ids [batch, seq], with the head axis at 1."""
ROTATED = """
cos_part = Mul(x, cos)
sin_part = Mul(turned, sin)
y = Add(cos_part, sin_part)
"""
HALVES = """
x1 = Slice(x, c0, c4, last)
x2 = Slice(x, c4, end, last, c1)
negative = Neg(x2)
turned = Concat<axis=-1>(negative, x1)
"""
PAIRS = """
even = Slice(x, c0, end, last, c2)
odd = Slice(x, c1, end, last, c2)
negative = Neg(odd)
a = Unsqueeze(negative, last)
b = Unsqueeze(even, last)
stacked = Concat<axis=-1>(a, b)
turned = Reshape(stacked, flat)
"""


@dataclass(frozen=True)
class Spelling:
    """`columns` says which of the angles each column of the tables has; `packed`: one table, sines first."""

    body: str
    columns: tuple[int, ...]
    look_up: str = LOOK_UP
    rotary: int = SIZE
    interleaved: bool = False
    packed: bool = False


_HALF, _PAIR, _ONCE = (0, 1, 2, 3, 0, 1, 2, 3), (0, 0, 1, 1, 2, 2, 3, 3), (0, 1, 2, 3)

SPELLINGS = {
    "halves by Slice": Spelling(HALVES + ROTATED, _HALF),
    "halves by Split": Spelling(
        "x1, x2 = Split<axis=-1>(x, halves)\nnegative = Neg(x2)\nturned = Concat<axis=3>(negative, x1)" + ROTATED, _HALF
    ),
    "halves, negated by a product": Spelling(HALVES.replace("Neg(x2)", "Mul(minus, x2)") + ROTATED, _HALF),
    "halves by Reshape": Spelling(
        """
        split = Constant<value_ints=[0, 0, 0, 2, 4]>()
        grid = Reshape(x, split)
        x1, x2 = Split<axis=-2, num_outputs=2>(grid)
        negative = Neg(x2)
        stacked = Concat<axis=-2>(negative, x1)
        turned = Reshape(stacked, flat)
        """
        + ROTATED,
        _HALF,
    ),
    "swapped operands": Spelling(
        HALVES + "cos_part = Mul(cos, x)\nsin_part = Mul(sin, turned)\ny = Add(sin_part, cos_part)", _HALF
    ),
    "subtracted": Spelling(
        HALVES.replace("Neg(x2)", "Identity(x2)")
        .replace("(negative, x1)", "(negative, other)")
        .replace("turned", "other = Neg(x1)\nturned", 1)
        + ROTATED.replace("Add", "Sub"),
        _HALF,
    ),
    "two products, halves": Spelling(
        """
        x1, x2 = Split<axis=-1, num_outputs=2>(x)
        x1c = Mul(x1, cos)
        x2s = Mul(x2, sin)
        x2c = Mul(x2, cos)
        x1s = Mul(x1, sin)
        y1 = Sub(x1c, x2s)
        y2 = Add(x1s, x2c)
        y = Concat<axis=-1>(y1, y2)
        """,
        _ONCE,
    ),
    "two products, pairs": Spelling(
        """
        split = Reshape(x, pairs)
        x1 = Gather<axis=-1>(split, i0)
        x2 = Gather<axis=-1>(split, i1)
        x1c = Mul(x1, cos)
        x2s = Mul(x2, sin)
        x2c = Mul(x2, cos)
        x1s = Mul(x1, sin)
        d = Sub(x1c, x2s)
        s = Add(x2c, x1s)
        y1 = Unsqueeze(d, last)
        y2 = Unsqueeze(s, last)
        stacked = Concat<axis=-1>(y1, y2)
        y = Reshape(stacked, flat)
        """,
        _ONCE,
        interleaved=True,
    ),
    "pairs by Slice": Spelling(PAIRS + ROTATED, _PAIR, interleaved=True),
    "pairs by Reshape": Spelling(
        """
        split = Reshape(x, pairs)
        even, odd = Split<axis=4, num_outputs=2>(split)
        negative = Neg(odd)
        stacked = Concat<axis=-1>(negative, even)
        turned = Reshape(stacked, flat)
        """
        + ROTATED,
        _PAIR,
        interleaved=True,
    ),
    "pairs, repeated rows": Spelling(
        PAIRS + ROTATED,
        _ONCE,
        look_up=LOOK_UP.replace("cos =", "cos1 =").replace("sin =", "sin1 =")
        + """
        shape = Constant<value_ints=[1, 1, 1, 4, 2]>()
        cos2 = Unsqueeze(cos1, last)
        cos3 = Expand(cos2, shape)
        cos = Reshape(cos3, flat)
        sin2 = Unsqueeze(sin1, last)
        sin3 = Tile(sin2, twice)
        sin = Reshape(sin3, flat)
        """,
        interleaved=True,
    ),
    "pairs, sines and cosines in one table": Spelling(
        PAIRS + ROTATED,
        _ONCE,
        look_up="""
        rows = Gather<axis=0>(table, ids)
        sin1, cos1 = Split<axis=-1, num_outputs=2>(rows)
        sin2 = Unsqueeze(sin1, last)
        sin3 = Concat<axis=-1>(sin2, sin2)
        pairwise = Constant<value_ints=[0, 1, -1, 8]>()
        up = Unsqueeze(sin3, c1)
        sin = Reshape(up, pairwise)
        cos2 = Unsqueeze(cos1, last)
        cos3 = Concat<axis=-1>(cos2, cos2)
        down = Unsqueeze(cos3, c1)
        cos = Reshape(down, pairwise)
        """,
        interleaved=True,
        packed=True,
    ),
    "tables of another type": Spelling(
        HALVES + ROTATED,
        _HALF,
        look_up=LOOK_UP.replace("cos =", "cos1 =").replace("sin =", "sin1 =")
        + "cos2 = Cast<to=10>(cos1)\nsin2 = Cast<to=10>(sin1)\ncos = Cast<to=1>(cos2)\nsin = Cast<to=1>(sin2)",
    ),
    "a part by Slice": Spelling(
        """
        part = Slice(x, c0, c4, last)
        rest = Slice(x, c4, end, last)
        x1 = Slice(part, c0, c2, last)
        x2 = Slice(part, c2, end, last)
        negative = Neg(x2)
        turned = Concat<axis=-1>(negative, x1)
        """
        + ROTATED.replace("x,", "part,").replace("y =", "rotated =")
        + "y = Concat<axis=-1>(rotated, rest)",
        (0, 1, 0, 1),
        rotary=4,
    ),
    "a part by Split, pairs": Spelling(
        """
        part, rest = Split<axis=-1>(x, halves)
        even = Slice(part, c0, end, c3, c2)
        odd = Slice(part, c1, end, c3, c2)
        negative = Neg(odd)
        a = Unsqueeze(negative, last)
        b = Unsqueeze(even, last)
        stacked = Concat<axis=-1>(a, b)
        turned = Reshape(stacked, flat4)
        """
        + ROTATED.replace("x,", "part,").replace("y =", "rotated =")
        + "y = Concat<axis=-1>(rotated, rest)",
        (0, 0, 1, 1),
        rotary=4,
        interleaved=True,
    ),
    "a part, two products": Spelling(
        """
        sizes = Constant<value_ints=[2, 2, 4]>()
        x1, x2, rest = Split<axis=-1>(x, sizes)
        x1c = Mul(x1, cos)
        x2s = Mul(x2, sin)
        x2c = Mul(x2, cos)
        x1s = Mul(x1, sin)
        y1 = Sub(x1c, x2s)
        y2 = Add(x1s, x2c)
        y = Concat<axis=-1>(y1, y2, rest)
        """,
        (0, 1),
        rotary=4,
    ),
}


def tables(spelling: Spelling, frequencies: NDArray | None = None, factor: float = 1.0) -> dict[str, NDArray]:
    """cos and sin of positions times frequencies, by default 10000^(-2i/rotary)."""
    if frequencies is None:
        frequencies = 10000.0 ** (-np.arange(4) / 4)
    angles = np.arange(POSITIONS)[:, None] * frequencies[list(spelling.columns)]
    cos, sin = (factor * np.cos(angles)).astype(np.float32), (factor * np.sin(angles)).astype(np.float32)
    return {"table": np.concatenate([sin, cos], 1)} if spelling.packed else {"cos_table": cos, "sin_table": sin}


def model_of(
    body: str,
    weights: dict[str, NDArray],
    x: str = "float[B,4,S,8]",
    ids: str = "int64[B,S]",
    y: str = "",
    opset: int = 21,
) -> onnx.ModelProto:
    header = f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>'
    model = onnx.parser.parse_model(f"{header} m ({x} x, {ids} ids) => ({y or x} y) {{ {CONSTANTS} {body} }}")
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    return model


def spelled(name: str, **options: object) -> onnx.ModelProto:
    spelling = SPELLINGS[name]
    return model_of(spelling.look_up + spelling.body, tables(spelling), **options)  # type: ignore[arg-type]


def feeds(shape: tuple[int, ...] = (2, 4, 5, 8), ids: NDArray | None = None) -> dict[str, NDArray]:
    generator = np.random.default_rng()
    x = generator.standard_normal(shape, np.float32)
    return {"x": x, "ids": generator.integers(0, POSITIONS, (shape[0], shape[2])) if ids is None else ids}
