"""The status page: its figures by themselves, and the page in a real browser, fed by engines at work."""

import base64
import hashlib
import json
import math
import re
import shutil
import threading
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import CounterMetricFamily
from starlette.testclient import TestClient

from engines.runtime.info import EngineInfo
from engines.runtime.metrics import EngineMetrics
from engines.runtime.request import Request, SamplingParams
from engines.server.app import create_app
from engines.server.auth import Caller, KeyRing
from engines.server.load_figures import LoadHistory, quantile
from engines.server.served import LocalEngine
from engines.server.status_page import status_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
BOUNDS = (0.01, 0.1, 1.0, math.inf)
HOSTILE = "<img src=x onerror=alert(1)>&amp;"
PATIENCE = 60_000  # milliseconds

# --- percentiles


def buckets_from(values, bounds=BOUNDS):
    ordered = sorted(values)
    return tuple((bound, sum(value <= bound for value in ordered)) for bound in bounds)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([0.05] * 10, 0.5, 0.055),  # the middle of its bucket: 0.01 + 0.09 / 2
        ([0.05] * 10, 1.0, 0.1),
        ([0.005] * 4, 0.5, 0.005),
        ([0.005] * 9 + [0.5], 0.9, 0.01),
        ([0.005] * 9 + [0.5], 0.95, 0.55),
        ([50.0] * 3, 0.5, 1.0),  # above every bound: the last one, as PromQL has it
        ([0.05, 50.0], 0.99, 1.0),
    ],
)
def test_percentiles_from_buckets(values, share, expected):
    found = quantile(buckets_from(values), share)
    assert found == (None if expected is None else pytest.approx(expected))
    assert quantile((), share) is None


@given(st.lists(st.floats(0, 2), min_size=1, max_size=50), st.floats(0.01, 1))
def test_a_percentile_lies_in_the_bucket_of_the_true_one(values, share):
    found = quantile(buckets_from(values), share)
    true = sorted(values)[math.ceil(share * len(values)) - 1]
    above = bisect_left(BOUNDS, true)
    assert (0, *BOUNDS)[above] <= found <= min(BOUNDS[above], 1.0)


@given(st.lists(st.floats(0, 2), min_size=1, max_size=50))
def test_percentiles_rise_with_the_share(values):
    buckets = buckets_from(values)
    found = [quantile(buckets, share / 20) for share in range(1, 21)]
    assert found == sorted(found)


# --- the last minute


def counted(metrics, tokens=0, first=()):
    metrics.generated_tokens.inc(tokens)
    for seconds in first:
        metrics.first_token_seconds.observe(seconds)
    return metrics.families()


def test_rates_and_percentiles_are_of_the_last_minute_only():
    metrics, history = EngineMetrics("m"), LoadHistory()
    history.add(0.0, counted(metrics, 1000, [50.0] * 100))  # before anybody looked
    history.add(1.0, counted(metrics, 7, [0.003]))
    history.add(3.0, counted(metrics, 20, [0.003]))
    figures = history.figures()
    assert figures["window_seconds"] == 3
    assert figures["per_second"]["generated_tokens"] == pytest.approx(9)
    assert figures["history"]["generated_tokens"] == [7, 10]
    assert figures["totals"]["generated_tokens"] == 1027
    assert figures["latency"]["first_token"]["count"] == 2
    assert 0.0025 <= figures["latency"]["first_token"]["p99"] <= 0.005
    assert figures["latency"]["first_token"]["largest_bound"] == 60
    for second in range(4, 70):
        history.add(float(second), counted(metrics))
    later = history.figures()
    assert later["window_seconds"] == 60
    assert later["latency"]["first_token"] == {"p50": None, "p90": None, "p99": None, "count": 0, "largest_bound": 60}
    assert later["per_second"]["generated_tokens"] == 0
    assert later["history"]["generated_tokens"] == [0] * 60


def test_an_engine_that_was_away_and_starts_again_counts_from_zero():
    metrics, history = EngineMetrics("m"), LoadHistory()
    history.add(0.0, counted(metrics, 500, [0.2] * 5))
    history.add(1.0, counted(metrics, 10))
    history.add(2.0, [])
    supervisor = CounterMetricFamily("kiln_engine_restarts", "", labels=["model"])
    supervisor.add_metric(["m"], 1)
    history.add(3.0, [supervisor])
    away = history.figures()
    assert (away["totals"]["engine_restarts"], away["totals"]["generated_tokens"]) == (1, 510)
    history.add(4.0, [*counted(EngineMetrics("m"), 8, [0.3] * 2), supervisor])
    figures = history.figures()
    assert figures["history"]["generated_tokens"] == [10, None, None, 8]
    assert figures["latency"]["first_token"]["count"] == 2
    assert figures["totals"]["generated_tokens"] == 8


def test_before_anything_happened_nothing_is_claimed():
    figures = LoadHistory().figures()
    assert figures["per_second"] == {"prompt_tokens": None, "generated_tokens": None, "requests": None}
    assert figures["latency"]["queue"]["p50"] is None
    assert figures["now"]["blocks_free"] is None
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


class Scripted:
    """An engine of which the test says everything."""

    def __init__(self, name="scripted", kind="decoder"):
        self.info = EngineInfo(name, kind, source=f"{HOSTILE} source", sku="cpu-avx512")
        self.ready = True
        self.figures = EngineMetrics(name)
        self.values = {
            "running": 3,
            "waiting_interactive": 2,
            "waiting_batch": 5,
            "blocks_free": 50,
            "blocks_cached": 30,
            "blocks_held": 20,
        }
        for gauge in self.values:
            self.figures.gauge(gauge, gauge, lambda gauge=gauge: self.values[gauge])
        totals = {
            "preemptions": 4,
            "engine_restarts": 1,
            "prefix_lookups": 0,
            "prefix_hits": 0,
            "prefix_saved_tokens": 1234,
        }
        self.totals = {name: self.figures._counter(name, name) for name in totals}
        for total, value in totals.items():
            self.totals[total].inc(value)

    async def metrics(self):
        self.figures.batch_size.observe(4)
        self.totals["prefix_lookups"].inc(4)
        self.totals["prefix_hits"].inc(3)
        self.figures.generated_tokens.inc(10)
        self.figures.first_token_seconds.observe(0.2)
        self.figures.queue_seconds.observe(100.0)
        self.figures.finished("stop")
        return self.figures.families()


def test_the_figures_as_json(monkeypatch):
    monkeypatch.setattr("engines.server.status_page._INTERVAL", 0.01)
    with TestClient(create_app({"scripted": Scripted()})) as client:
        status = client.get("/status.json").json()
        while status["models"][0]["per_second"]["generated_tokens"] is None:
            status = client.get("/status.json").json()
    (model,) = status["models"]
    assert (model["name"], model["kind"], model["ready"]) == ("scripted", "decoder", True)
    assert model["now"] == Scripted().values
    assert model["prefix_hit_rate"] == 0.75
    assert model["means"] == {"batch_size": 4, "step_tokens": None}
    assert (model["totals"]["preemptions"], model["totals"]["engine_restarts"]) == (4, 1)
    assert (status["draining"], status["requests_running"]) == (False, 0)


# --- the page by itself


def test_the_page_needs_nothing_from_elsewhere():
    document, policy = status_page()
    assert not re.search(
        r"<link(?! rel=\"icon\" href=\"data:)|<(img|iframe|object|embed|base)\b|@import|url\(", document
    )
    assert not re.search(r"(src|href)=\"(?!data:)", document)
    assert "/* status." not in document
    for kind in ("style", "script"):
        text = re.search(rf"<{kind}>(.*?)</{kind}>", document, re.S)[1]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "innerHTML" not in document


def luminance(colour):
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first, second):
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_read_in_both_themes():
    """WCAG 2.2: 4.5 for text, 3 for what charts need to be understood."""
    themes = re.findall(r":root \{(.*?)\}", status_page()[0], re.S)
    assert len(themes) == 2
    for theme in themes:
        colour = dict(re.findall(r"--([\w-]+): (#\w{6})", theme))
        for text in ("ink", "muted", "good", "warn", "bad"):
            assert contrast(colour[text], colour["surface"]) >= 4.5, text
            assert contrast(colour[text], colour["page"]) >= 4.5, text
        for line in ("first", "second", "held"):
            assert contrast(colour[line], colour["surface"]) >= 3, line


# --- the page in a browser


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watched:
    """A page, what it asked for, and what it complained of."""

    def __init__(self, browser, url, **options):
        self.page = browser.new_page(**options)
        self.page.set_default_timeout(PATIENCE)
        self.requests, self.complaints = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(url)

    def wait(self, expression, argument=None):
        self.page.wait_for_function(expression, arg=argument)

    def state(self, text):
        self.wait("text => document.getElementById('state').textContent.startsWith(text)", text)

    def texts(self, selector):
        return self.page.locator(selector).all_inner_texts()


@pytest.fixture
def watch(browser):
    pages = []

    def make(url, **options):
        pages.append(Watched(browser, url, **options))
        return pages[-1]

    yield make
    for watched in pages:
        watched.page.close()


def test_numbers_move_while_a_real_engine_works(fake_engine, served, watch):
    engine, stop = fake_engine(), threading.Event()

    def work():
        number = 0
        while not stop.is_set():
            number += 1
            prompt = tuple(2 + (number * step) % 90 for step in range(1, 12))
            list(engine.submit(Request(prompt, SamplingParams(max_tokens=20, ignore_eos=True))))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    try:
        server = served({"fake": LocalEngine(engine)})
        watched = watch(server.url)
        watched.state("Live")
        value = ".chart:nth-child(1) .value span"
        watched.wait("s => parseFloat(document.querySelector(s)?.textContent.replace(',', '')) > 0", value)
        before = watched.page.locator(value).inner_text()
        watched.wait("([s, before]) => document.querySelector(s).textContent !== before", [value, before])
        line = ".chart:nth-child(1) path.line"
        watched.wait("s => document.querySelector(s).getAttribute('d').split('L').length > 2", line)
        table = watched.page.get_by_role("table")
        row = table.get_by_role("row", name="Token to next token").inner_text().split("\t")
        assert all(re.fullmatch(r"[\d.,]+ (ms|s)", cell.strip()) for cell in row[1:]), row
        watched.wait("() => /\\d+ length/.test(document.querySelector('[data-rows=work]').textContent)")
        assert watched.complaints == []
        assert {url.removeprefix(server.url) for url in watched.requests if not url.startswith("data:")} == {
            "/",
            "/status.json",
        }
    finally:
        stop.set()
        for worker in workers:
            worker.join(30)


def test_every_figure_is_in_its_place(served, watch):
    scripted, plain = Scripted(HOSTILE), Scripted("plain", "model")
    watched = watch(served({HOSTILE: scripted, "plain": plain}).url)
    watched.wait("() => document.querySelectorAll('section').length === 2")
    watched.wait("() => document.querySelector('[data-rows=prefixes]').textContent.includes('75 %')")
    decoder = watched.page.locator("section").first
    assert decoder.locator("h2").inner_text() == HOSTILE
    assert decoder.locator(".title").inner_text().endswith(f"{HOSTILE} source")
    assert decoder.get_by_role("img", name="20 (20 %) held, 30 (30 %) cached, 50 (50 %) free").is_visible()
    widths = [decoder.locator(f"svg.cache .{kind}").get_attribute("width") for kind in ("held", "cached", "free")]
    assert widths == ["200", "300", "500"]
    requests = decoder.locator(".chart:nth-child(2)")
    assert requests.locator(".value").inner_text() == "3 running7 waiting"
    assert re.match(
        "Requests, last minute: now 3 running, 7 waiting; peak 7", requests.locator("svg").get_attribute("aria-label")
    )
    rows = dict(row.split("\n") for row in decoder.locator("[data-rows] > div").all_inner_texts())
    assert rows["Prefix hit rate, last minute"] == "75 %"
    assert rows["Prompt tokens saved since start"] == "1,234"
    assert rows["Sequences in a step, mean"] == "4.0"
    assert rows["Waiting, interactive / batch"] == "2 / 5"
    assert rows["Preemptions since start"] == "4"
    assert rows["Engine restarts"] == "1"
    assert re.fullmatch(r"\d+ stop", rows["Requests ended"])
    assert "≥ 60 s" in decoder.get_by_role("row", name="Arrival to first step").inner_text()
    second = watched.page.locator("section").nth(1)
    assert second.locator("figcaption").all_inner_texts() == [
        "Requests per second",
        "In the queue",
        "Whole request",
        "Batch size",
    ]
    plain.ready = False
    watched.wait("() => document.querySelectorAll('section')[1].textContent.includes('Not ready')")
    assert watched.complaints == []


def test_pointing_at_a_chart_reads_a_value(served, watch):
    watched = watch(served({"scripted": Scripted()}).url)
    watched.wait("() => (document.querySelector('path.line')?.getAttribute('d') || '').includes('L')")
    chart = watched.page.locator(".chart").nth(1)
    box = chart.locator("svg").bounding_box()
    watched.page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 5)
    assert chart.locator(".note").inner_text() == "now: 3 · 7"
    watched.page.mouse.move(0, 0)
    assert chart.locator(".note").inner_text() == "last minute, peak 7"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_telephone_in_both_themes(served, watch, scheme):
    server = served({"scripted": Scripted("a-rather-long-name-" * 4), "plain": Scripted("plain", "model")})
    watched = watch(server.url, color_scheme=scheme, viewport={"width": 360, "height": 700})
    watched.wait("() => document.querySelectorAll('section').length === 2")
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= 360
    background = watched.page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", background))) / 3
    assert (brightness > 200) == (scheme == "light")


def test_it_says_when_the_server_is_gone_and_when_it_is_back(served, watch):
    server = served({"scripted": Scripted()})
    watched = watch(server.url)
    watched.state("Live")
    watched.page.context.set_offline(True)
    watched.state("Server not reachable; figures of ")
    assert watched.page.locator("body.stale").count() == 1
    assert watched.page.locator("h2").inner_text() == "scripted"
    watched.page.context.set_offline(False)
    watched.state("Live")
    assert watched.page.locator("body.stale").count() == 0
    server.end()
    watched.state("Server not reachable; figures of ")


def test_it_asks_for_a_key_where_keys_are_used(served, watch):
    keys = KeyRing({hashlib.sha256(b"secret-key").digest(): Caller("team")})
    watched = watch(served({"scripted": Scripted()}, keys=keys).url)
    watched.state("API key needed")
    for key, state in (("wrong-key", "API key needed"), ("secret-key", "Live")):
        watched.page.get_by_label("This server asks for an API key").fill(key)
        watched.page.get_by_role("button", name="Show").click()
        if key == "wrong-key":
            watched.wait("() => document.getElementById('key-problem').textContent.includes('does not know')")
        watched.state(state)
    assert watched.page.locator("h2").inner_text() == "scripted"
    assert not watched.page.locator("#key").is_visible()
    watched.page.reload()
    watched.state("Live")
