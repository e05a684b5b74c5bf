"""The status page by itself, and in a real browser, fed by engines at work."""

import base64
import hashlib
import re
import shutil
import threading

import pytest

from engines.runtime.request import Request, SamplingParams
from engines.server.auth import Caller, KeyRing
from engines.server.served import LocalEngine
from engines.server.status_page import status_page
from tests.engines.scripted_engine import HOSTILE, Scripted

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 60_000  # milliseconds

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
