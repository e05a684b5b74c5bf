"""Figures, remarks and the page of `kiln load`, from outcomes made up for them."""

import math
from typing import Any

import numpy as np
import pytest

from pipeline.load_test.page import html_from_report
from pipeline.load_test.report import Slo, percentiles_of, remarks, report_from_run, table_from_report
from pipeline.load_test.run import Outcome, Run
from plugins.errors import KilnError


def outcome(index: int, first: float, gap: float, tokens: int, **changes: Any) -> Outcome:
    deliveries = [index + first + gap * place for place in range(tokens)]
    known: dict[str, Any] = {
        "planned_output": tokens,
        "output_tokens": tokens,
        "planned_prompt": 10,
        "prompt_tokens": 10,
    }
    known |= {"sent": float(index), "deliveries": deliveries, "end": deliveries[-1]}
    return Outcome(index, "interactive", float(index), **(known | changes))


def report_of(outcomes: list[Outcome], slo: Slo, interrupted: bool = False):
    run = Run(tuple(outcomes), 10.0, interrupted)
    return run, report_from_run(run, target="t", model="m", workload="w", loop="open", slo=slo)


def test_figures_are_those_of_arithmetic_done_by_hand() -> None:
    outcomes = [outcome(i, first=0.1 * (i + 1), gap=0.05, tokens=5) for i in range(10)]
    _, report = report_of(outcomes, Slo(first_token=0.55, inter_token=0.06))
    first = report.latencies["first_token"]
    assert (first.count, first.p50, first.highest) == (10, pytest.approx(0.55), pytest.approx(1.0))
    assert first.p99 == pytest.approx(np.percentile(np.arange(1, 11) / 10, 99))
    assert report.latencies["inter_token"].count == 40
    assert report.latencies["inter_token"].p99 == pytest.approx(0.05)
    assert report.latencies["end_to_end"].p50 == pytest.approx(0.75)
    assert report.requests_per_second == pytest.approx(1.0)
    assert report.input_tokens_per_second == pytest.approx(10.0)
    assert report.output_tokens_per_second == pytest.approx(5.0)
    assert report.goodput == pytest.approx(0.5)
    assert report.good_share == pytest.approx(0.5)
    assert remarks(report) == []
    assert table_from_report(report) is not None


def test_an_answer_is_good_only_within_both_limits() -> None:
    slow_first, slow_pace, single = outcome(0, 0.5, 0.01, 5), outcome(0, 0.1, 0.2, 5), outcome(0, 0.1, 0.2, 1)
    slo = Slo(0.4, 0.1)
    assert [slo.met(each) for each in (slow_first, slow_pace, single)] == [False, False, True]
    assert Slo(first_token=0.4).met(slow_pace)
    assert Slo(inter_token=0.1).met(slow_first)
    assert not slo.met(outcome(0, 0.1, 0.01, 5, error="failed"))
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(KilnError, match="positive"):
            Slo(first_token=wrong)


def test_several_tokens_at_once_count_in_the_pace() -> None:
    assert outcome(0, 0.1, 0.3, 4, output_tokens=10).time_per_token == pytest.approx(0.1)


def test_a_reader_is_told_what_spoils_the_figures() -> None:
    outcomes = [
        outcome(0, 0.1, 0.01, 5, prompt_tokens=11),
        outcome(1, 0.1, 0.01, 5, planned_output=6),
        outcome(2, 0.1, 0.01, 5, sent=2.05),
        outcome(3, 0.1, 0.01, 5),
    ]
    outcomes[3].end = None
    _, report = report_of(outcomes, Slo(), interrupted=True)
    text = " ".join(remarks(report))
    assert (report.answered, report.unfinished, report.miscounted_prompts, report.short_answers) == (3, 1, 1, 1)
    for part in ("Interrupted while 1", "1 prompts had another number", "1 answers ended before", "bottleneck"):
        assert part in text


def test_lanes_are_shown_apart() -> None:
    outcomes = [outcome(i, 0.1, 0.01, 5) for i in range(4)]
    outcomes[3].lane = "batch"
    _, report = report_of(outcomes, Slo())
    assert {lane: found["first_token"].count for lane, found in report.lanes.items()} == {"interactive": 3, "batch": 1}


def test_percentiles_of_nothing_are_nothing() -> None:
    assert percentiles_of([]).p99 is None


def test_the_page_is_self_contained_and_escaped() -> None:
    pytest.importorskip("matplotlib")
    outcomes = [outcome(i, 0.1 * (i + 1), 0.01, 5) for i in range(5)]
    run = Run(tuple(outcomes), 10.0, False)
    report = report_from_run(run, target="<b>&", model="<script>", workload="w", loop="open", slo=Slo(0.3, 0.2))
    page = html_from_report(report, run)
    assert page.count("<svg") == 7
    assert "<script" not in page
    assert "<b>" not in page
    assert "src=" not in page
    empty = Run((), 0.0, True)
    assert "<svg" not in html_from_report(
        report_from_run(empty, target="t", model="m", workload="w", loop="open", slo=Slo()), empty
    )
