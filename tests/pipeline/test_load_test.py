"""Traces, arrivals, targets and figures of `kiln load`, against real HTTP and a real engine."""

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from engines.runtime.engine import Engine
from pipeline.cli_load import load_command
from pipeline.load_test.page import html_from_report
from pipeline.load_test.report import Slo, percentiles_of, remarks, report_from_run, table_from_report
from pipeline.load_test.run import LoadConfig, Outcome, Run, replay
from pipeline.load_test.targets import BundleTarget, LoadError, LoadRequest, UrlTarget, Usage
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

ROOT = Path(__file__).parents[2]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# Traces


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


# Replay


class Gated:
    """A target that answers when it is told to, and knows how many it has."""

    name, vocabulary = "gated", 100

    def __init__(self, release_at: int) -> None:
        self.running = self.most = self.seen = 0
        self.prompts: list[LoadRequest] = []
        self._release_at = release_at
        self._gate = asyncio.Event()

    async def answer(self, request: LoadRequest, deliver: Callable[[], None]) -> Usage:
        self.prompts.append(request)
        self.seen += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.running >= self._release_at:
                self._gate.set()
            await self._gate.wait()
            await asyncio.sleep(0)
            deliver()
            return Usage(len(request.prompt), request.output_tokens)
        finally:
            self.running -= 1

    async def close(self) -> None:
        pass


def test_an_open_loop_does_not_wait_for_answers() -> None:
    async def run() -> tuple[Gated, Run]:
        target = Gated(release_at=8)  # answers nobody before all eight are there
        trace = Workload(rate=1000.0).draw(8, 0)
        return target, await replay(target, trace, LoadConfig(warmup=0, timeout=60))

    target, result = asyncio.run(run())
    assert target.most == 8
    assert sum(outcome.answered for outcome in result.outcomes) == 8
    assert all(outcome.sent >= outcome.due for outcome in result.outcomes)


def test_a_closed_loop_has_as_many_requests_in_flight_as_users() -> None:
    async def run() -> tuple[Gated, Run]:
        target = Gated(release_at=3)
        return target, await replay(target, Workload().draw(20, 0), LoadConfig(3, warmup=0, timeout=60))

    target, result = asyncio.run(run())
    assert (target.most, target.seen) == (3, 20)
    assert sorted(outcome.index for outcome in result.outcomes) == list(range(20))
    assert len({request.prompt for request in target.prompts}) == 20


def test_warm_up_is_not_measured() -> None:
    async def run() -> tuple[Gated, Run]:
        target = Gated(release_at=1)
        return target, await replay(target, Workload(rate=1e3).draw(2, 0), LoadConfig(warmup=3))

    target, result = asyncio.run(run())
    assert (target.seen, len(result.outcomes)) == (5, 2)


def test_an_interrupt_returns_what_was_measured() -> None:
    async def run() -> Run:
        target = Gated(release_at=10**9)
        target._gate.set()
        trace = (*Workload(rate=1e3).draw(2, 0), TraceRequest(arrival=1e6, prompt_tokens=1, output_tokens=1))
        answered = asyncio.Event()

        def observe(outcomes: tuple[Outcome, ...]) -> None:
            if sum(outcome.answered for outcome in outcomes) == 2:
                answered.set()

        task = asyncio.create_task(replay(target, trace, LoadConfig(warmup=0), observe))
        await asyncio.wait_for(answered.wait(), 60)
        task.cancel()
        return await task

    result = asyncio.run(run())
    assert result.interrupted
    assert [outcome.answered for outcome in result.outcomes] == [True, True]


class Failing(Gated):
    """Each request fails in its own way."""

    async def answer(self, request: LoadRequest, deliver: Callable[[], None]) -> Usage:
        self.seen += 1
        if self.seen == 1:
            raise LoadError("HTTP 429", "too many")
        if self.seen == 2:
            await asyncio.Event().wait()
        return Usage(1, 0)


def test_failures_are_counted_by_kind() -> None:
    async def run() -> Run:
        return await replay(Failing(1), Workload(rate=1e4).draw(3, 0), LoadConfig(warmup=0, timeout=0.2))

    report = report_from_run(asyncio.run(run()), target="t", model="m", workload="w", loop="open", slo=Slo(1.0))
    assert {error.kind: error.count for error in report.errors} == {"HTTP 429": 1, "timeout": 1, "no tokens": 1}
    assert report.answered == 0
    assert report.goodput == 0
    assert report.latencies["first_token"].p50 is None
    assert "too many" in " ".join(remarks(report))
    json.loads(report.to_json())


# Figures


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


# Servers


class Served:
    """An application on a real socket, in a thread of its own."""

    def __init__(self, app: Any) -> None:
        import uvicorn

        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)


class Server(Served):
    """Speaks the OpenAI API as far as a load generator sees it, and fails on demand: by the prompt's length."""

    KEY = "secret-key"

    def __init__(self) -> None:
        from fastapi import FastAPI, Request
        from fastapi.responses import JSONResponse, StreamingResponse

        app = FastAPI()
        self.bodies: list[dict[str, Any]] = []
        self.arrived = threading.Event()

        def denied(request: Request) -> bool:
            return request.headers.get("authorization") != f"Bearer {self.KEY}"

        @app.get("/v1/models")
        async def models(request: Request):
            if denied(request):
                return JSONResponse({"error": {"message": "wrong key"}}, 401)
            return {"data": [{"id": "m", "vocab_size": 321}, {"id": "slow"}]}

        async def answer(body: dict[str, Any], tokens: int, choice: Callable[[int], dict[str, Any]]):
            count = body["max_tokens"]
            for place in range(count):
                if tokens == 6 and place == 1:
                    yield 'data: {"error": {"message": "the step failed"}}\n\n'
                    return
                if tokens == 7 and place == 1:
                    return
                if body["model"] == "slow" and place == 1:
                    await asyncio.Event().wait()
                last = {"finish_reason": "length"} if place == count - 1 else {"finish_reason": None}
                text = choice(place) if place < count - 1 else choice(0)  # a token without text is never the last
                yield f"data: {json.dumps({'choices': [text | last]})}\n\n"
            usage = {"prompt_tokens": tokens, "completion_tokens": count}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

        @app.post("/v1/completions")
        async def completions(request: Request):
            body = await request.json()
            self.bodies.append(body)
            self.arrived.set()
            if len(body["prompt"]) == 5:
                return JSONResponse({"error": {"message": "too many wait"}}, 429)
            stream = answer(body, len(body["prompt"]), lambda place: {"text": "" if place == 1 else "x"})
            return StreamingResponse(stream, media_type="text/event-stream")

        @app.post("/v1/chat/completions")
        async def chat(request: Request):
            body = await request.json()
            self.bodies.append(body)

            async def stream():
                yield 'data: {"choices": [{"delta": {"role": "assistant"}, "finish_reason": null}]}\n\n'
                async for event in answer(body, 9, lambda place: {"delta": {"content": "x"}}):
                    yield event

            return StreamingResponse(stream(), media_type="text/event-stream")

        super().__init__(app)


@pytest.fixture
def server() -> Iterator[Server]:
    for package in ("fastapi", "uvicorn", "httpx"):
        pytest.importorskip(package)
    running = Server()
    yield running
    running.close()


def run_url(server: Server, trace: tuple[TraceRequest, ...], **connect: Any) -> tuple[UrlTarget, Run]:
    async def run() -> tuple[UrlTarget, Run]:
        target = await UrlTarget.connect(server.url, **({"api_key": server.KEY, "model": "m"} | connect))
        try:
            return target, await replay(target, trace, LoadConfig(warmup=0, timeout=60))
        finally:
            await target.close()

    return asyncio.run(run())


def test_a_server_gets_exactly_the_tokens_of_the_trace(server: Server) -> None:
    trace = Workload(Lengths(40, 0.5, 10, 200), Lengths(6, 0.4), rate=500.0).draw(30, 0)
    target, run = run_url(server, trace)
    assert target.vocabulary == 321
    sent = sorted((len(body["prompt"]), body["max_tokens"]) for body in server.bodies)
    assert sent == sorted((request.prompt_tokens, request.output_tokens) for request in trace)
    for body in server.bodies:
        assert (body["model"], body["ignore_eos"], body["stream"]) == ("m", True, True)
        assert "lane" not in body
        assert max(body["prompt"]) < 321
    for each in run.outcomes:
        assert each.answered
        assert each.prompt_tokens == each.planned_prompt
        assert each.output_tokens == each.planned_output == len(each.deliveries)


def test_messages_go_to_the_chat_endpoint_and_lanes_are_named(server: Server) -> None:
    messages = ({"role": "user", "content": "Hello"},)
    trace = (
        TraceRequest(messages=messages, output_tokens=3),
        TraceRequest(prompt="four", output_tokens=2, lane="batch"),
    )
    _, run = run_url(server, trace)
    chat, text = sorted(server.bodies, key=lambda body: "prompt" in body)
    assert chat["messages"] == list(messages)
    assert (text["prompt"], text["lane"]) == ("four", "batch")
    by_index = {outcome.index: outcome for outcome in run.outcomes}
    assert (by_index[0].prompt_tokens, len(by_index[0].deliveries)) == (9, 3)
    assert by_index[1].prompt_tokens == 4


def test_errors_of_a_server_have_their_kinds(server: Server) -> None:
    trace = tuple(TraceRequest(prompt_tokens=count, output_tokens=4) for count in (5, 6, 7, 8))
    _, run = run_url(server, trace)
    found = {outcome.planned_prompt: (outcome.error, outcome.message) for outcome in run.outcomes}
    assert found[5] == ("HTTP 429", "too many wait")
    assert found[6] == ("failed", "the step failed")
    assert found[7][0] == "disconnected"
    assert found[8] == (None, "")


def test_a_server_that_cannot_be_used_is_refused_at_once(server: Server) -> None:
    for options, message in (
        ({"api_key": None}, "401: wrong key; .*--api-key-file"),
        ({"model": None}, "serves m, slow; choose one with --model"),
        ({"model": "absent"}, "serves m, slow, not absent"),
    ):
        with pytest.raises(KilnError, match=message):
            run_url(server, (), **options)
    closed = socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    closed.close()
    with pytest.raises(KilnError, match=r"no answer from .*ConnectError"):
        asyncio.run(UrlTarget.connect(f"http://127.0.0.1:{port}"))


def test_an_interrupt_of_the_command_prints_what_it_has(server: Server, tmp_path: Path) -> None:
    key = write(tmp_path / "key", f"{server.KEY}\n")
    program = "from pipeline.cli import kiln_group, run_command; run_command(kiln_group)"
    command = [sys.executable, "-c", program, "load", f"{server.url}/v1", "--model", "slow", "--warmup", "0", "--json"]
    process = subprocess.Popen(
        [*command, "--api-key-file", str(key)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert server.arrived.wait(60), process.communicate(timeout=10)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    document = json.loads(out)
    assert document["interrupted"]
    assert document["sent"] >= document["unfinished"] >= 1
    assert "Traceback" not in err


def test_kilns_own_server_is_loaded(llama_bundle: Path) -> None:
    for package in ("fastapi", "uvicorn", "httpx"):
        pytest.importorskip(package)
    from engines.server.app import create_app
    from engines.server.served import LocalEngine

    trace = (
        *Workload(Lengths(30, 0.4), Lengths(5, 0.3), shared_prefix=32).draw(6, 0),
        TraceRequest(prompt="Hello", output_tokens=3, lane="batch"),
        TraceRequest(prompt_tokens=9999, output_tokens=3),
    )
    with Engine.open(llama_bundle, threads=1) as engine:
        running = Served(create_app({"llama": LocalEngine(engine)}))

        async def run() -> Run:
            target = await UrlTarget.connect(running.url, vocabulary=500)
            try:
                return await replay(target, trace, LoadConfig(3, warmup=1, timeout=60))
            finally:
                await target.close()

        result = asyncio.run(run())
        running.close()
        assert engine.free_blocks == engine.info.num_blocks
    *answered, refused = sorted(result.outcomes, key=lambda each: each.index)
    for each, asked in zip(answered, trace, strict=False):
        assert each.answered, each.message
        assert each.output_tokens == asked.output_tokens
        assert asked.prompt_tokens in (None, each.prompt_tokens)
    assert refused.error == "HTTP 400"
    assert "9999 tokens" in refused.message


# Bundles


def test_a_bundle_is_loaded_by_the_command(llama_bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ["--requests", "6", "--rate", "50", "--prompt-tokens", "30,0.4", "--output-tokens", "5,0.3"]
    files = ["--html", str(tmp_path / "page.html"), "--save-trace", str(tmp_path / "trace.jsonl")]
    slo = ["--slo-first-token", "60", "--slo-inter-token", "60"]
    arguments = [str(llama_bundle), *options, *files, *slo, "--json", "--threads", "1"]
    result = CliRunner().invoke(load_command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    trace = trace_from_file(tmp_path / "trace.jsonl")
    assert (document["answered"], document["errors"], document["short_answers"]) == (6, [], 0)
    assert document["miscounted_prompts"] == 0
    assert document["goodput"] == pytest.approx(document["requests_per_second"])
    tokens = document["output_tokens_per_second"] * document["seconds"]
    assert tokens == pytest.approx(sum(request.output_tokens for request in trace))
    assert "6 of 6 answered" in result.stderr
    assert (tmp_path / "page.html").read_text().count("<svg") == 7


def test_requests_that_a_bundle_refuses_are_counted(llama_bundle: Path) -> None:
    async def run() -> Run:
        target = BundleTarget.open(llama_bundle, threads=1)
        trace = (
            TraceRequest(prompt_tokens=9999, output_tokens=1),
            TraceRequest(prompt="Hello", output_tokens=2),
            TraceRequest(prompt_tokens=7, output_tokens=3, lane="batch"),
        )
        try:
            return await replay(target, trace, LoadConfig(2, warmup=0, timeout=60))
        finally:
            await target.close()

    first, second, third = sorted(asyncio.run(run()).outcomes, key=lambda each: each.index)
    assert first.error == "refused"
    assert "9999 tokens" in first.message
    assert second.output_tokens == 2
    assert (third.prompt_tokens, third.output_tokens, third.lane) == (7, 3, "batch")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trace", "t", "--fit", "t"], "--fit has no meaning beside it"),
        (["--trace", "t", "--rate", "2"], "--rate has no meaning beside it"),
        (["--rate", "0"], "the rate is 0.0"),
        (["--burstiness", "-1"], "burstiness is -1"),
        (["--prompt-tokens", "many"], "lengths are 'many'"),
        (["--requests", "0"], "expected at least 1"),
        (["--concurrency", "0"], "concurrency is 0"),
        (["--timeout", "0"], "timeout is 0"),
        (["--warmup", "-1"], "warmup is -1"),
        (["--seed", "-1"], "seed is -1"),
        (["--slo-first-token", "0"], "limit of first_token is 0"),
        (["--api-key-file", "absent"], "no API key can be read"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(KilnError, match=message):
        CliRunner().invoke(load_command, ["http://127.0.0.1:1", *options], catch_exceptions=False)
