"""Rows of logits with their sampling parameters, drawn for tests of the sampling operators on any device."""

from dataclasses import astuple, dataclass, fields

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray


@dataclass(frozen=True)
class Rows:
    """Operands of `kiln::Sample` in its order: logits [rows, vocabulary], the rest [rows]."""

    logits: NDArray[np.float32]
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.int64]
    position: NDArray[np.int32]

    def operands(self) -> tuple[NDArray, ...]:
        return astuple(self)

    def row(self, number: int) -> "Rows":
        return self.chosen(slice(number, number + 1))

    def chosen(self, which: slice | NDArray) -> "Rows":
        return Rows(**{field.name: getattr(self, field.name)[which] for field in fields(self)})


def same_row(logits: NDArray, count: int, temperature: float = 1.0, **filters: float) -> Rows:
    """One row `count` times, each with a draw of its own."""
    given = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}
    return Rows(
        np.tile(np.asarray(logits, np.float32), (count, 1)),
        np.full(count, temperature, np.float32),
        np.full(count, given["top_k"], np.int32),
        np.full(count, given["top_p"], np.float32),
        np.full(count, given["min_p"], np.float32),
        np.arange(count, dtype=np.int64) // 7,
        np.arange(count, dtype=np.int32) % 7,
    )


def random_rows(seed: int, rows: int, vocabulary: int, step: float = 0.0, dtype: type = np.float32) -> Rows:
    """Rows of every kind; with a `step`, logits are multiples of it, so that many are equal."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, vocabulary)) * rng.choice([1e-4, 0.3, 1.0, 4.0, 30.0], (rows, 1))
    logits += rng.choice([0.0, 100.0, -1000.0], (rows, 1))
    if step:
        logits = np.round(logits / step) * step
    for row in range(0, rows, 5):
        logits[row, rng.integers(0, vocabulary, vocabulary // 3)] = -np.inf
        logits[row, rng.integers(vocabulary)] = 3.0
    return Rows(
        logits.astype(dtype).astype(np.float32),
        rng.choice(
            [0.0, 1e-45, 1e-3, 0.7, 1.0, 2.0, 1e6, 3e38], rows, p=[0.1, 0.05, 0.1, 0.2, 0.3, 0.15, 0.05, 0.05]
        ).astype(np.float32),
        rng.choice([-1, 0, 1, 2, 20, vocabulary - 1, vocabulary, vocabulary + 9, 2**31 - 1], rows).astype(np.int32),
        rng.choice([1e-9, 0.1, 0.5, 0.9, 0.999, 0.9999999, 1.0, 2.0], rows).astype(np.float32),
        rng.choice([-1.0, 0.0, 0.0, 1e-4, 0.1, 1.0], rows).astype(np.float32),
        rng.integers(-(2**63), 2**63, rows),
        rng.integers(0, 2**31, rows).astype(np.int32),
    )


ROWS = st.builds(
    random_rows,
    st.integers(0, 2**32 - 1),
    st.integers(1, 6),
    st.one_of(st.integers(1, 40), st.integers(1, 5000)),
    st.sampled_from([0.0, 0.25, 1.0]),
)
