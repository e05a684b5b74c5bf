"""Traces of `kiln load`: read from files, drawn, fitted, cut, and written again."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from pipeline.load_test.trace import (
    Lengths,
    TraceRequest,
    Workload,
    adapted,
    jsonl_from_trace,
    lengths_from_text,
    trace_from_file,
    workload_from_trace,
)
from plugins.errors import KilnError


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_jsonl_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    lines = [
        {"arrival": 2, "prompt_tokens": 640, "output_tokens": 32, "prefix": "support", "prefix_tokens": 512},
        {"arrival": 1.5, "prompt": "Once", "output_tokens": 16, "lane": "batch"},
        {"arrival": 0.5, "messages": [{"role": "user", "content": "Hello"}], "output_tokens": 4},
        {"prompt": [5, 6, 7], "output_tokens": 1},
    ]
    trace = trace_from_file(write(tmp_path / "t", "\n\n".join(map(json.dumps, lines)) + "\n"))
    assert [request.arrival for request in trace] == [0, 0.5, 1.5, 2]
    assert trace[0].prompt == (5, 6, 7)
    assert trace[1].messages is not None
    assert trace[1].messages[0].content == "Hello"
    assert trace[2].lane == "batch"
    assert (trace[3].prefix, trace[3].prefix_tokens, trace[3].prompt_tokens) == ("support", 512, 640)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt_tokens": 5}', "line 2: output_tokens: Field required"),
        ('{"prompt_tokens": 0, "output_tokens": 1}', "greater than or equal to 1"),
        ('{"prompt_tokens": 5, "output_tokens": 1, "prompt": "x"}', "give one of prompt_tokens, prompt and messages"),
        ('{"output_tokens": 1}', "give one of"),
        ('{"prompt": "", "output_tokens": 1}', "the prompt is empty"),
        ('{"prompt_tokens": 5, "output_tokens": 1, "prefix": "a"}', "prefix and prefix_tokens go together"),
        ('{"prompt_tokens": 5, "output_tokens": 1, "prefix": "a", "prefix_tokens": 6}', "at least as many"),
        ('{"prompt_tokens": 5, "output_tokens": 1, "lane": "fast"}', "lane: Input should be 'interactive' or 'batch'"),
        ('{"prompt_tokens": 5, "output_tokens": 1, "arrival": -1}', "arrival: Input should be greater"),
        ('{"prompt_tokens": 5, "output_tokens": 1, "arrived": 1}', "arrived: Extra inputs are not permitted"),
        ("{", "Invalid JSON"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "t", f'{{"prompt_tokens": 5, "output_tokens": 1}}\n{line}\n')
    with pytest.raises(KilnError, match=message):
        trace_from_file(path)


def test_an_azure_trace_starts_with_its_earliest_line(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:51.2225670,879,0\n"
    )
    trace = trace_from_file(write(tmp_path / "t.csv", text))
    assert [request.arrival for request in trace] == pytest.approx([0, 4.314579, 4.541977])
    assert [(request.prompt_tokens, request.output_tokens) for request in trace] == [(374, 44), (396, 109), (879, 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a,b\n1,2\n", "lacks TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "a heading and nothing else"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,2\n", "line 2 is 'now,1,2'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,0,2\n", "two token counts of at least 1"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,7\n", "line 2"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(KilnError, match=message):
        trace_from_file(write(tmp_path / "t", text))


def test_a_missing_or_binary_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KilnError, match="No such file"):
        trace_from_file(tmp_path / "absent")
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KilnError, match="not UTF-8"):
        trace_from_file(tmp_path / "b")


@pytest.mark.parametrize("burstiness", [0.0, 0.5, 1.0, 3.0])
def test_arrivals_have_the_rate_and_burstiness_asked_for(burstiness: float) -> None:
    trace = Workload(rate=4.0, burstiness=burstiness).draw(20_000, seed=3)
    gaps = np.diff([request.arrival for request in trace])
    assert trace[0].arrival == 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.08)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness, abs=0.1)


def test_lengths_are_lognormal_and_clipped() -> None:
    lengths = Lengths(64, 0.8, 8, 512).draw(20_000, np.random.default_rng(0))
    assert np.median(lengths) == pytest.approx(64, rel=0.03)
    assert (min(lengths), max(lengths)) == (8, 512)
    free = np.log(Lengths(2000, 0.5).draw(20_000, np.random.default_rng(0)))
    assert free.std() == pytest.approx(0.5, rel=0.03)
    assert set(Lengths(7).draw(5, np.random.default_rng(0))) == {7}


def test_a_draw_depends_on_its_seed_alone() -> None:
    workload = Workload(burstiness=2.0, shared_prefix=16)
    assert workload.draw(50, 1) == workload.draw(50, 1)
    assert workload.draw(50, 1) != workload.draw(50, 2)


def test_a_fit_finds_the_parameters_of_what_was_drawn() -> None:
    drawn = Workload(Lengths(300, 0.7), Lengths(60, 0.4), rate=5.0, burstiness=2.0).draw(20_000, 0)
    fitted = workload_from_trace(drawn)
    assert fitted.prompt.median == pytest.approx(300, rel=0.03)
    assert fitted.prompt.sigma == pytest.approx(0.7, rel=0.03)
    assert fitted.output.median == pytest.approx(60, rel=0.03)
    assert fitted.output.longest == max(request.output_tokens for request in drawn)
    assert fitted.rate == pytest.approx(5.0, rel=0.05)
    assert fitted.burstiness == pytest.approx(2.0, rel=0.05)


def test_a_fit_needs_lengths_and_gaps() -> None:
    three = TraceRequest(prompt_tokens=5, output_tokens=1), TraceRequest(prompt="x", output_tokens=1)
    with pytest.raises(KilnError, match="at least 3"):
        workload_from_trace(three)
    with pytest.raises(KilnError, match="as text"):
        workload_from_trace((*three, three[1]))
    with pytest.raises(KilnError, match="at one moment"):
        workload_from_trace((three[0],) * 3)


def test_prompts_have_exactly_their_length_and_share_their_prefix() -> None:
    shared = TraceRequest(prompt_tokens=100, output_tokens=1, prefix="a", prefix_tokens=60)
    other = shared.model_copy(update={"prefix": "b"})
    first, second, third = shared.token_ids(0, 7, 50), shared.token_ids(1, 7, 50), other.token_ids(2, 7, 50)
    assert len(first) == len(second) == 100
    assert first[:60] == second[:60] != third[:60]
    assert first[60:] != second[60:]
    assert first == shared.token_ids(0, 7, 50)
    assert first != shared.token_ids(0, 8, 50)
    assert set(first) <= set(range(50))


def test_a_trace_written_and_read_again_is_the_same(tmp_path: Path) -> None:
    trace = Workload(shared_prefix=8).draw(20, 0)
    assert trace_from_file(write(tmp_path / "t", jsonl_from_trace(trace))) == trace


def test_a_trace_is_cut_and_sped_up() -> None:
    trace = Workload(Lengths(100), Lengths(50), rate=1.0, burstiness=0, shared_prefix=64).draw(10, 0)
    cut = adapted(trace, limit=3, speed=4.0, most_prompt=32, most_output=5)
    assert [request.arrival for request in cut] == [0, 0.25, 0.5]
    assert {(r.prompt_tokens, r.prefix_tokens, r.output_tokens) for r in cut} == {(32, 32, 5)}
    for options in ({"limit": 0}, {"speed": 0.0}, {"speed": math.nan}, {"most_prompt": 0}):
        with pytest.raises(KilnError, match="expected"):
            adapted(trace, **options)


def test_lengths_in_words() -> None:
    assert lengths_from_text("64") == Lengths(64)
    assert lengths_from_text("64,0.5") == Lengths(64, 0.5)
    assert lengths_from_text("64,0.5,8,512") == Lengths(64, 0.5, 8, 512)
    for text in ("", "x", "64,0.5,8", "64,0.5,8,512,1", "0", "64,-1", "64,nan", "64,1,9,8", "inf"):
        with pytest.raises(KilnError):
            lengths_from_text(text)
