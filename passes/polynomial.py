"""Elementwise arithmetic read as a polynomial, so that one comparison of coefficients covers all its spellings.

`0.5 * x * (1 + t)`, `x * (0.5 * t + 0.5)` and `(x * (t + 1)) / 2` are one polynomial in x and t. Knows Add, Sub, Mul,
Div by a number, Neg and Pow with a small whole exponent; numbers are constants of one element. Reads a graph, changes
nothing.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from passes.pattern import in_scope, min_rank, only_consumer, producer, scalar_of

Polynomial = dict[tuple[int, ...], float]
"""Coefficients other than 0 by the powers of the variables: {(1, 0): 0.5, (1, 1): 0.5} is 0.5 x + 0.5 x t."""

ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Neg", "Pow")
_DEPTH = 8
_HIGHEST_POWER = 4
_WRITTEN_OUT = 1e-4
"""Relative error of constants that exporters write with four digits, such as 0.7071."""


def polynomial_of(tensor: gs.Tensor, variables: Sequence[gs.Tensor], depth: int = _DEPTH) -> Polynomial | None:
    """`tensor` as a polynomial in `variables`, which all have one shape; None if it is none, or has another shape."""
    nothing = (0,) * len(variables)
    for index, variable in enumerate(variables):
        if tensor is variable:
            return {tuple(int(index == i) for i in range(len(variables))): 1.0}
    if isinstance(tensor, gs.Constant):
        value = scalar_of(tensor)
        return None if value is None or len(tensor.shape) > min_rank(variables[0]) else _tidied({nothing: value})
    node = producer(tensor, *ARITHMETIC)
    if node is None or depth == 0:
        return None
    operands = []
    for operand in node.inputs:
        polynomial = polynomial_of(operand, variables, depth - 1)
        if polynomial is None:
            return None
        operands.append(polynomial)
    combined = _combine(node.op, operands)
    return None if combined is None else _tidied(combined)


def _combine(op: str, operands: list[Polynomial]) -> Polynomial | None:
    left = operands[0]
    if op == "Neg":
        return _scaled(left, -1.0)
    right = operands[1]
    if op in ("Add", "Sub"):
        return _sum(left, right if op == "Add" else _scaled(right, -1.0))
    if op == "Mul":
        return _product(left, right)
    number = _number(right)
    if number is None:
        return None
    if op == "Div":
        return None if number == 0 else _scaled(left, 1 / number)
    if number not in range(1, _HIGHEST_POWER + 1):
        return None
    power = left
    for _ in range(int(number) - 1):
        power = _product(power, left)
    return power


def _tidied(polynomial: Polynomial) -> Polynomial:
    return {powers: value for powers, value in polynomial.items() if value != 0}


def _number(polynomial: Polynomial) -> float | None:
    return None if any(any(powers) for powers in polynomial) else sum(polynomial.values())


def _scaled(polynomial: Polynomial, factor: float) -> Polynomial:
    return {powers: value * factor for powers, value in polynomial.items()}


def _sum(left: Polynomial, right: Polynomial) -> Polynomial:
    return {powers: left.get(powers, 0.0) + right.get(powers, 0.0) for powers in {**left, **right}}


def _product(left: Polynomial, right: Polynomial) -> Polynomial:
    found: Polynomial = {}
    for powers, value in left.items():
        for others, factor in right.items():
            together = tuple(a + b for a, b in zip(powers, others, strict=True))
            found[together] = found.get(together, 0.0) + value * factor
    return found


def tolerance_of(tensor: gs.Tensor) -> float:
    """How far a coefficient may be from its formula's, relatively, in a graph that stores it in the dtype of `tensor`.

    Two stored constants, each rounded by half a unit, may be multiplied into one coefficient.
    """
    dtype = tensor.dtype
    if isinstance(dtype, int):  # of a type that NumPy itself lacks
        dtype = onnx.helper.tensor_dtype_to_np_dtype(dtype)
    exponent = {"float16": -10, "bfloat16": -7}.get("" if dtype is None else np.dtype(dtype).name, -23)
    return max(_WRITTEN_OUT, 1.01 * 2.0**exponent)


def agrees(found: Polynomial | None, wanted: Mapping[tuple[int, ...], float], tolerance: float) -> bool:
    """Whether two polynomials have the same powers and, within the relative `tolerance`, the same coefficients."""
    if found is None or set(found) != set(wanted):
        return False
    return all(abs(found[powers] - value) <= tolerance * abs(value) for powers, value in wanted.items())


def variables_of(tensor: gs.Tensor) -> Iterator[gs.Tensor]:
    """Tensors that `tensor` may be a polynomial in: itself and what arithmetic makes it from, nearest first."""
    layer, seen = [tensor], {id(tensor)}
    for _ in range(_DEPTH):
        yield from layer
        above = [
            operand
            for item in layer
            for node in [producer(item, *ARITHMETIC)]
            if node is not None
            for operand in node.inputs
        ]
        layer = []
        for operand in above:
            if id(operand) not in seen and not isinstance(operand, gs.Constant):
                seen.add(id(operand))
                layer.append(operand)


def root_of(
    scope: gs.Graph, variables: Sequence[gs.Tensor], wanted: Mapping[tuple[int, ...], float], tolerance: float
) -> gs.Node | None:
    """The node that computes the polynomial `wanted`, below the last variable, whose only use it is."""
    tensor = variables[-1]
    for _ in range(_DEPTH):
        node = only_consumer(scope, tensor, *ARITHMETIC)
        if node is None:
            return None
        tensor = node.outputs[0]
        found = polynomial_of(tensor, variables)
        if found is None:
            return None
        if agrees(found, wanted, tolerance):
            return node if in_scope(scope, node) else None
    return None
