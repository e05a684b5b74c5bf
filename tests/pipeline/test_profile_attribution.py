"""Activities of a device and the nodes that they belong to, from events of profilers that are written by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipeline.device_trace import (
    Activity,
    Span,
    activities_by_window,
    activities_from_trace,
    exclusive_spans,
)
from pipeline.profile.attribution import COPIES, OUTSIDE, clock_shift, owners_of_steps, run_of_step
from pipeline.profile.ort_events import KernelCall, Run
from plugins.errors import KilnError

pytest.importorskip("onnxruntime")

US = 1000
"""Nanoseconds."""


def kernel(name: str, start: float, end: float, launch: tuple[float, float] | None = None) -> Activity:
    """Times in microseconds."""
    return Activity(name, span(start, end), True, None if launch is None else span(*launch))


def copy(start: float, end: float, launch: tuple[float, float] | None = None) -> Activity:
    return replace(kernel("Memcpy HtoD (Pinned -> Device)", start, end, launch), is_kernel=False)


def span(start: float, end: float) -> Span:
    return Span(round(start * US), round(end * US))


def run_of(*nodes: tuple[str, float, float]) -> Run:
    """Operator, start and end in microseconds."""
    calls = tuple(
        KernelCall(index, f"n{index}", operator, start / 1e6, (end - start) / 1e6, {})
        for index, (operator, start, end) in enumerate(nodes)
    )
    return Run(nodes[0][1] / 1e6, (nodes[-1][2] - nodes[0][1]) / 1e6, calls)


def test_a_trace_of_torchs_profiler_is_read_with_its_launches() -> None:
    def event(category: str, name: str, start: float, duration: float, correlation: int) -> dict[str, Any]:
        return {
            **{"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration},
            "args": {"correlation": correlation},
        }

    base = 1_790_857_026_000_000_000
    events = [
        event("kernel", "late", 5209348076147.683, 2.5, 7),
        event("cuda_runtime", "cudaLaunchKernel", 5209348076100.001, 3.25, 7),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 5209348076120.5, 1.0, 8),
        event("cuda_driver", "cuLaunchKernelEx", 5209348076110.0, 2.0, 9),
        event("kernel", "early", 5209348076125.0, 4.0, 9),
        {"ph": "M", "name": "process_name", "ts": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 1.0, "dur": 2.0, "args": {}},
    ]
    found = activities_from_trace({"traceEvents": events, "baseTimeNanoseconds": base})
    assert [(one.name, one.is_kernel) for one in found] == [
        ("Memcpy HtoD (Pinned -> Device)", False),
        ("early", True),
        ("late", True),
    ]
    late = base + 5209348076147683
    assert found[2].span == Span(late, late + 2500)
    assert found[2].launch == Span(late - 47682, late - 47682 + 3250)
    assert found[0].launch is None


def test_what_overlaps_counts_once() -> None:
    """The second begins before the first ends, the third lies inside it, the fourth comes after a pause."""
    found = exclusive_spans([kernel("a", 0, 10), kernel("b", 8, 15), kernel("c", 9, 12), kernel("d", 20, 21)])
    assert found == [span(0, 10), span(10, 15), span(15, 15), span(20, 21)]


def test_activities_belong_to_the_step_in_whose_time_they_begin() -> None:
    activities = [kernel("a", 1, 3), kernel("b", 9, 25), kernel("c", 30, 31)]
    parts = activities_by_window(activities, [span(0, 10), span(20, 40)])
    assert [[one.name for one in part] for part in parts] == [["a", "b"], ["c"]]
    with pytest.raises(KilnError, match="nothing of 1 of 2 steps, but 3 activities"):
        activities_by_window(activities, [span(0, 10), span(50, 60)])


def test_clocks_that_are_far_apart_are_shifted_to_where_all_fits() -> None:
    """Nodes of different lengths, so that nothing nearer does."""
    lengths = np.random.default_rng(0).integers(5, 25, 80)
    ends = np.cumsum(lengths)
    nodes = [span(end - length, end) for length, end in zip(lengths, ends, strict=True)]
    launches = [Span(node.start + US + 60 * US, node.end - US + 60 * US) for node in nodes]
    assert abs(clock_shift(launches, nodes) + 60 * US) <= US


@pytest.mark.parametrize("apart", [-2500, 0, 1750])
def test_clocks_that_are_a_little_apart_are_shifted(apart: int) -> None:
    """Launches end just before their nodes do: 1 us, which the shift must leave a way through."""
    nodes = [span(start, start + 8) for start in range(0, 400, 8)]
    launches = [Span(node.start + 3 * US - apart, node.end - US - apart) for node in nodes]
    assert abs(clock_shift(launches, nodes) - apart) <= 2 * US
    shifted = [Span(one.start + clock_shift(launches, nodes), one.end) for one in launches]
    assert all(node.start <= one.start < node.end for one, node in zip(shifted, nodes, strict=True))


def test_clocks_that_do_not_fit_are_an_error() -> None:
    nodes = [span(start, start + 8) for start in range(0, 400, 8)]
    with pytest.raises(KilnError, match="clocks of the two profilers disagree"):
        clock_shift([span(start, start + 5) for start in range(1000, 1400, 8)], nodes)
    with pytest.raises(KilnError, match="0 launches"):
        clock_shift([], nodes)


RUN = run_of(("Gather", 100, 110), ("Linear", 110, 130), ("Reshape", 130, 131), ("Sample", 131, 150))
STEP = [
    copy(90, 91),
    kernel("gather", 120, 122, (104, 107)),
    copy(122, 123, (112, 114)),
    kernel("gemm", 124, 150, (116, 120)),
    kernel("sample", 149, 152, (140, 144)),
    replace(copy(153, 154), name="Memcpy DtoH (Device -> Pinned)"),
]


def test_a_kernel_belongs_to_the_node_that_launched_it() -> None:
    origin = 5_000_000
    shifted = [
        replace(one, launch=one.launch and Span(one.launch.start + origin, one.launch.end + origin)) for one in STEP
    ]
    (owners,) = owners_of_steps([shifted], [RUN], origin)
    assert [(owner.operator, owner.index) for owner in owners] == [
        (COPIES, OUTSIDE),
        ("Gather", 0),
        ("Linear", 1),
        ("Linear", 1),
        ("Sample", 3),
        (COPIES, OUTSIDE),
    ]


@pytest.mark.parametrize(
    ("stray", "message"),
    [(kernel("stray", 160, 161, (170, 172)), "outside of every node"), (kernel("stray", 160, 161), "has no launch")],
)
def test_a_kernel_without_a_node_is_an_error(stray: Activity, message: str) -> None:
    many = [kernel(f"k{i}", i, i + 1, (111 + i / 10, 112 + i / 10)) for i in range(100)]
    with pytest.raises(KilnError, match=f"the kernel stray .*{message}"):
        owners_of_steps([[*many, stray]], [RUN], 0)


def test_a_captured_step_takes_its_nodes_by_position() -> None:
    (owners,) = owners_of_steps([STEP], [RUN], 0)
    captured = [replace(one, launch=None) for one in STEP]
    run = run_of_step(captured, owners, 90 * US)
    assert run.in_operators == pytest.approx((1 + 2 + 1 + 26 + 2 + 1) * 1e-6)
    assert run.seconds == pytest.approx(run.in_operators + 1e-6)  # from the first kernel to the last one pause
    assert run.start + run.seconds == pytest.approx(64e-6)
    assert [call.name for call in run.calls][3:5] == ["n1", "n3"]
    assert run.calls[4].seconds == pytest.approx(2e-6)  # of three, one beside the product
    assert run.calls[3].arguments == {"kernel": "gemm"}


@pytest.mark.parametrize(
    ("captured", "message"),
    [
        ([*STEP[:3], replace(STEP[3], name="other gemm"), *STEP[4:]], "number 3: other gemm instead of gemm"),
        (STEP[:-1], "ran 5 kernels and copies .* ran 6; .* number 5: nothing more instead of Memcpy DtoH"),
        ([*STEP, kernel("more", 200, 201)], "number 6: more instead of nothing more"),
    ],
)
def test_a_captured_step_that_ran_something_else_is_an_error(captured: list[Activity], message: str) -> None:
    (owners,) = owners_of_steps([STEP], [RUN], 0)
    with pytest.raises(KilnError, match=message):
        run_of_step(captured, owners, 0)
