"""What is measured beside what it could be at best, what it must be, and what vLLM reaches on the same GPU.

vLLM 0.26.0 with FlashAttention 3, full CUDA graphs and asynchronous scheduling, in bfloat16, on 2026-11-29. Its trace
had 213,522 prompt tokens and 50,787 output tokens, of the same distributions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Goal:
    """What a figure must be: at most `target`, or at least for a rate; and what vLLM has. None where nothing is set."""

    target: float | None = None
    vllm: float | None = None


GOALS: Mapping[str, Goal] = {
    "attention, 1 x 4096": Goal(18, 20),
    "attention, 8 x 4096": Goal(vllm=48),
    "attention, 64 x 512": Goal(vllm=49),
    "attention, 64 x 4096": Goal(270, 256),
    "attention, 256 x 1024": Goal(290, 279),
    "attention, prompt of 4096": Goal(350),
    "decode step, batch 1": Goal(4.6, 4.86),
    "decode step, batch 8": Goal(4.9, 5.05),
    "decode step, batch 32": Goal(5.6, 5.73),
    "decode step, batch 64": Goal(6.5, 6.58),
    "decode step, batch 128": Goal(8.4, 8.45),
    "first token, prompt of 512": Goal(16, 15.6),
    "first token, prompt of 4096": Goal(105, 100.2),
    "256 requests": Goal(5300, 5264),
    "host, batch 128": Goal(0.3),
}
"""By the figure's name, in its unit."""
LOW_BIT_GOALS: Mapping[str, Goal] = {
    "decode step, batch 1, over 16 bits": Goal(0.65),
    "decode step, batch 128, over 16 bits": Goal(1.0),
}
"""Of a run with weights of 8 bits beside one in 16."""


@dataclass(frozen=True)
class Figure:
    """One measurement. `best` is the least time, or for a rate the highest, that this machine could reach."""

    name: str
    value: float
    unit: str
    best: float | None = None
    is_rate: bool = False

    @property
    def goal(self) -> Goal:
        return GOALS.get(self.name) or LOW_BIT_GOALS.get(self.name, Goal())

    def over(self, other: float | None) -> float | None:
        """How many times as slow as something of the same unit."""
        if other is None or not self.value or not other:
            return None
        return other / self.value if self.is_rate else self.value / other

    @property
    def missed(self) -> bool:
        ratio = self.over(self.goal.target)
        return ratio is not None and ratio > 1

    def sentence(self) -> str:
        return f"{self.name}: {_number(self.value)} {self.unit}"

    def to_json(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "unit": self.unit,
            "best": self.best,
            "over_best": self.over(self.best),
            "target": self.goal.target,
            "missed": self.missed,
            "vllm": self.goal.vllm,
            "over_vllm": self.over(self.goal.vllm),
        }


def table(figures: Sequence[Figure]) -> str:
    """For people; 'x' columns say how many times as slow the figure is."""
    head = ("", "measured", "unit", "at best", "x", "target", "", "vLLM", "x")
    rows = [head, *(_row(figure) for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    sides = "<><>>><>>"
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    )


def _row(figure: Figure) -> tuple[str, ...]:
    goal = figure.goal
    verdict = "" if goal.target is None else "missed" if figure.missed else "met"
    return (
        *(figure.name, _number(figure.value), figure.unit),
        *(_number(figure.best), _ratio(figure.over(figure.best))),
        *(_number(goal.target), verdict, _number(goal.vllm), _ratio(figure.over(goal.vllm))),
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
