"""Which variants an ablation has, how they are built, and a whole one of a tiny decoder."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.ablate.variants import DECODER_SWITCHES, PLAIN_SWITCHES, AblateConfig, build_config, variants
from pipeline.cli import kiln_group
from pipeline.ledger.store import Ledger
from plugins.errors import KilnError


def test_each_switch_alone_then_all_in_order() -> None:
    found = variants(DECODER_SWITCHES)
    titles = [variant.title(DECODER_SWITCHES) for variant in found]
    assert titles == [
        "none",
        "fusion",
        "kv",
        "batching",
        "quantisation",
        "fusion + kv",
        "fusion + kv + batching",
        "fusion + kv + batching + quantisation",
    ]
    assert [variant.parent for variant in found] == [None, 0, 0, 0, 0, 1, 5, 6]
    for variant in found[1:]:
        assert variant.parent is not None
        assert variant.on - found[variant.parent].on == {variant.change.removesuffix(" on")}
    assert [variant.on for variant in variants(PLAIN_SWITCHES)][-1] == set(PLAIN_SWITCHES)


def test_only_what_is_built_decides_the_bundle() -> None:
    bundles = {variant.bundle for variant in variants(DECODER_SWITCHES)}
    assert bundles == {
        frozenset(),
        frozenset({"fusion"}),
        frozenset({"quantisation"}),
        frozenset({"fusion", "quantisation"}),
    }
    config = AblateConfig()
    bare = build_config(config, frozenset(), True, Path("x"))
    assert bare.passes.only == ("bind_attention",)
    assert bare.quantize is None
    whole = build_config(config, frozenset({"fusion", "quantisation"}), True, Path("x"))
    assert whole.passes == config.build.passes
    assert whole.quantize is config.quantize


@pytest.mark.parametrize("wrong", [{"requests": 0}, {"output": 1}, {"repetitions": 0}])
def test_settings_without_a_meaning_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(KilnError, match="expected at least"):
        AblateConfig(**wrong)


@pytest.mark.slow
def test_a_whole_ablation(llama_folder: Path, tmp_path: Path) -> None:
    """One table and eight entries, each with its parent; explain tells the same steps."""
    pytest.importorskip("onnxruntime")
    ledger = tmp_path / "ledger.sqlite"
    options = ["--requests", "2", "--prompt", "8", "--output", "3", "--repetitions", "1", "--compared-tokens", "32"]
    options += ["--threads", "1", "--ledger", str(ledger), "--out", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(kiln_group, ["ablate", str(llama_folder), *options])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["variants"]
    assert len(rows) == 8
    measured = [row for row in rows if row["failure"] is None]
    assert [row["on"] for row in measured[:4]] == [[], ["fusion"], ["kv"], ["batching"]]
    assert all(row["rates"][0] > 0 and row["peak_memory"] > 0 for row in measured)
    assert rows[0]["accuracy"] is None
    with Ledger(ledger, create=False) as opened:
        entries = {entry.number: entry for entry in opened.entries(kind="ablation")}
    assert len(entries) == len(measured)
    last = max(entries)
    explained = CliRunner().invoke(kiln_group, ["explain", entries[last].path, "--ledger", str(ledger), "--json"])
    steps = json.loads(explained.stdout)["ablation"]
    assert steps[-1]["entry"] == last
    assert [step["change"] for step in steps[1:]][:2] == ["fusion on", "kv on"]
