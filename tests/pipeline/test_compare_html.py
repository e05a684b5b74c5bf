"""The HTML report: self-contained, escaped, labelled, and really rendered by a browser where there is one."""

import html
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.compare.html import html_from_report, write_html
from pipeline.compare.report import Check, ComparisonReport, Curves, OutputRow, PromptRow, Side
from plugins.errors import KilnError

pytest.importorskip("matplotlib")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]
HOSTILE = "<script>alert('x')</script>&amp;\"quoted\""


def side(kind: str, name: str) -> Side:
    return Side(kind, name, f"/models/{name}", "ab" * 32, "fp32", {"torch": "2.13.0"})  # type: ignore[arg-type]


def decoder_report(**changes: object) -> ComparisonReport:
    count = 64
    checks = (
        Check("logit_error_max", "largest logit error", 3e-3, "at most", 2e-3, "command line", False, "at token 3"),
        Check("kl_mean", "mean KL(A || B) in nats", 1e-9, "at most", 1e-6, "default", True),
    )
    curves = Curves(
        positions=tuple(range(count)),
        error_max=tuple(1e-4 * (1 + i % 7) for i in range(count)),
        kl_mean=tuple(1e-10 * (1 + i % 5) for i in range(count)),
        kl_edges=(-11.0, -10.0, -9.0),
        kl_counts=(3, 61),
        window_starts=(0, 32),
        window_perplexity_a=(20.0, 30.0),
        window_perplexity_b=(20.1, 30.1),
    )
    report = ComparisonReport(
        created="2026-01-01T00:00:00Z",
        model_kind="decoder",
        a=side("torch", HOSTILE),
        b=side("bundle", "engine"),
        machine={"cpu": "some CPU"},
        settings={"text": "some text"},
        checks=checks,
        outputs=(OutputRow("logits", "64x512", 3e-3, 1e-5, 1e-5, 0.2, 32768, False, HOSTILE),),
        figures={"perplexity_a": 25.0, "perplexity_b": 25.1, "kl_mean": 1e-9},
        curves=curves,
        prompts=(PromptRow(HOSTILE, 5, 64, 64), PromptRow("second", 2000, 64, 12, "A chose 1, B chose 2")),
    )
    return replace(report, **changes)


def plain_report() -> ComparisonReport:
    rows = tuple(
        OutputRow(f"a_rather_long_output_name_{i}", "4x8", error, error / 2, error / 3, 0.1, 32, True)
        for i, error in enumerate((0.0, 1e-6, math.nan))
    )
    check = Check("output:x", "output x", 1e-6, "at most", 1e-4, "default", True)
    return decoder_report(model_kind="plain", outputs=rows, checks=(check,), curves=None, prompts=(), figures={})


def test_nothing_outside_the_page_is_needed() -> None:
    page = html_from_report(decoder_report())
    assert not re.search(r"<(script|link|img|iframe|object|embed|base)\b", page)
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", page)
    assert not re.search(r"url\((?!#)|@import", page)
    assert len(page) < 400_000


def test_what_comes_from_models_and_users_is_escaped() -> None:
    page = html_from_report(decoder_report())
    assert "<script>alert" not in page
    assert html.escape(HOSTILE, quote=False).replace('"', "&#34;").replace("'", "&#39;") in page


def test_every_plot_has_a_name_a_description_and_ids_of_its_own() -> None:
    page = html_from_report(decoder_report())
    assert page.count("<svg ") == 5
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for label in re.findall(r'aria-labelledby="([^"]+)"', page):
        assert set(label.split()) <= set(ids)
    for reference in re.findall(r'(?:href="|url\()#([^")]+)', page):
        assert reference in ids
    assert "#0a0b0" not in page  # every placeholder colour became a variable
    assert "var(--side-a)" in page


@pytest.mark.parametrize("report", [decoder_report(), plain_report()], ids=["decoder", "plain"])
def test_verdict_values_limits_and_origins_are_there(report: ComparisonReport) -> None:
    page = html_from_report(report)
    assert ("Within tolerance" if report.passed else "Beyond tolerance") in page
    for check in report.checks:
        assert check.title in html.unescape(page)
        assert check.origin in page
    assert report.a.sha256 in page
    assert report.b.path in page


def test_odd_values_are_drawn() -> None:
    curves = decoder_report().curves
    assert curves is not None
    for error in ((0.0,) * 64, (math.nan,) * 64, (math.inf,) * 64):
        report = decoder_report(curves=replace(curves, error_max=error, kl_mean=error, window_perplexity_b=error[:2]))
        assert html_from_report(report).count("<svg ") == 5


def test_a_path_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(KilnError, match="the HTML report cannot be written to"):
        write_html(plain_report(), tmp_path / "file" / "report.html")


def test_missing_folders_are_made(tmp_path: Path) -> None:
    write_html(plain_report(), tmp_path / "new" / "folder" / "report.html")
    assert "<svg" in (tmp_path / "new" / "folder" / "report.html").read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("report", [decoder_report(), plain_report()], ids=["decoder", "plain"])
def test_a_browser_renders_it_without_overflow(report: ComparisonReport, width: int, tmp_path: Path) -> None:
    """The page sits in a frame of the width; a script outside it measures what was laid out."""
    page = html.escape(html_from_report(report))
    measure = """
      const doc = frame.contentDocument, view = frame.contentWindow;
      const boxes = [...doc.querySelectorAll('figure svg')].map(e => e.getBoundingClientRect());
      const size = e => parseFloat(view.getComputedStyle(e).fontSize);
      const scale = e => e.getBoundingClientRect().width / e.viewBox.baseVal.width;
      const texts = [...doc.querySelectorAll('figure svg text')].map(e => size(e) * scale(e.ownerSVGElement));
      document.body.dataset.result = JSON.stringify({
        title: doc.title, scroll: doc.documentElement.scrollWidth, height: doc.documentElement.scrollHeight,
        plots: boxes.filter(b => b.width > 250 && b.height > 100 && b.right <= view.innerWidth).length,
        smallest: Math.min(...texts), cards: doc.querySelectorAll('.card').length});
    """
    wrapper = tmp_path / "frame.html"
    wrapper.write_text(
        f'<body style="margin:0"><iframe id="frame" style="border:0;width:{width}px;height:900px" srcdoc="{page}">'
        f"</iframe><script>frame.onload = () => {{ {measure} }}</script>"
    )
    screenshot = tmp_path / "page.png"
    profile = [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", f"--window-size={width},900"]
    command = [CHROMIUM, *FLAGS, *profile, "--dump-dom", wrapper.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout
    found = re.search(r'data-result="([^"]+)"', dom)
    assert found is not None, dom[-2000:]

    result = json.loads(html.unescape(found[1]))
    expected = 5 if report.curves else 1
    assert result["plots"] == expected
    assert result["scroll"] <= width, "the page scrolls sideways"
    assert result["smallest"] >= 6, "a plot's text is too small to read"
    assert result["cards"] >= expected + 3
    assert result["height"] > 900
    assert result["title"].startswith("Within" if report.passed else "Beyond")
    command = [CHROMIUM, *FLAGS, *profile, f"--screenshot={screenshot}", wrapper.as_uri()]
    subprocess.run(command, capture_output=True, timeout=90, check=True)
    assert screenshot.read_bytes().startswith(b"\x89PNG")
    assert screenshot.stat().st_size > 10_000
