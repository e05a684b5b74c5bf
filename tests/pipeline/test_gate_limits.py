"""Limits: files, conventions, what follows from the noise floor, and in which order they hold."""

import math
from pathlib import Path

import pytest

from pipeline.gate.generation import GenerationConfig, generation_within
from pipeline.gate.keep import advise, rank_layers
from pipeline.gate.layers import LayerRow
from pipeline.gate.limits import METRICS, PERPLEXITY, Basis, GateLimits, limit_of, limits_from_toml
from pipeline.gate.material import (
    Cut,
    DecoderData,
    TextStratum,
    decoder_data_from_tokens,
    default_cuts,
    samples_from_npz,
)
from pipeline.gate.report import Trial
from plugins.errors import KilnError

FLOOR = {
    "kl_mean": 1e-4,
    "kl_p99": 1e-3,
    "kl_max": 0.01,
    "output_max_error": 0.1,
    "output_snr_db": 60.0,
    "output_cosine": 1 - 1e-6,
    "top1_agreement": 0.995,
    "greedy_agreement": 0.001,
    "repetition": 0.2,
}


def basis(*schemes: str, **floor: float) -> Basis:
    return Basis(schemes, True, floor, "rounding")


def value(metric: str, limits: GateLimits, found: Basis, stratum: str = "long") -> float:
    limit = limit_of(metric, stratum, limits, found)
    assert limit is not None
    assert limit.origin
    return limit.value


def test_the_coarsest_scheme_decides_perplexity_and_kl() -> None:
    plain = GateLimits()
    assert value("perplexity", plain, basis("w8a16", "w8a8-dynamic")) == PERPLEXITY["w8a8-dynamic"] == 0.02
    assert value("kl_mean", plain, basis("w8a16")) == pytest.approx(2 * math.log(1.005))
    assert value("perplexity_worst", plain, basis("w8a8")) == pytest.approx(0.06)
    with pytest.raises(KilnError, match="no limits for the scheme 'w2a2'"):
        basis("w2a2")


def test_the_floor_is_scaled_by_the_power_that_the_convention_allows() -> None:
    found = basis("w8a8-dynamic", **FLOOR)
    times = 1.5 * math.log(1.02) / 1e-4
    limits = GateLimits(margin=1.5)
    assert value("kl_p99", limits, found) == pytest.approx(1e-3 * times * 1.5)
    assert value("output_max_error", limits, found) == pytest.approx(0.1 * math.sqrt(times) * 1.5)
    assert value("output_snr_db", limits, found) == pytest.approx(60 - 10 * math.log10(times) - 20 * math.log10(1.5))
    assert value("top1_agreement", limits, found) == pytest.approx(1 - 0.005 * math.sqrt(times) * 1.5)
    assert value("output_cosine", limits, found) == pytest.approx(1 - 1e-6 * times * 1.5)
    assert 0.3 < value("greedy_agreement", limits, found) < 0.9
    assert value("repetition", limits, found) == pytest.approx(0.3)
    origin = limit_of("kl_p99", "long", limits, found).origin
    assert "rounding has 0.001" in origin
    assert "at 297 times its power, margin 1.5" in origin
    assert "rounding has 1 - 0.005" in limit_of("top1_agreement", "long", limits, found).origin


def test_without_a_floor_nothing_is_made_up() -> None:
    assert limit_of("kl_p99", "long", GateLimits(), basis("w8a8")) is None
    assert limit_of("output_snr_db", "long", GateLimits(), basis("w8a8", output_snr_db=math.inf, kl_mean=0.0)) is None
    assert value("drift", GateLimits(), basis("w8a8")) == 0.1


def test_a_file_comes_before_all_others_and_one_stratum_before_all_strata(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text("margin = 3\n[limits]\nperplexity = 0.5\nkl_p99 = 9\n[strata.long]\nperplexity = 0.25\n")
    limits, found = limits_from_toml(path), basis("w8a8", **FLOOR)
    assert limits.margin == 3
    assert value("perplexity", limits, found, "short") == 0.5
    assert value("perplexity", limits, found, "long") == 0.25
    assert value("kl_p99", limits, found) == 9
    assert value("perplexity_worst", limits, found) == 0.5
    assert value("kl_mean", limits, found) == pytest.approx(3 * math.log(1.25))
    assert limit_of("perplexity", "long", limits, found).origin == "limits.toml, [strata.long]"
    with pytest.raises(KilnError, match="limits for the stratum 'long'; the data has short"):
        limits.require_strata(["short"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("margin = 0.5", "margin is 0.5; expected at least 1"),
        ("margin = 'wide'", "field 'margin'"),
        ("[limits]\nperplexty = 0.1", "limits has 'perplexty'; known are .*perplexity"),
        ("[limits]\nkl_mean = nan", "limits.kl_mean is no number"),
        ("[strata.long]\nkl = 1", "strata.long has 'kl'"),
        ("[limits]\nkl_mean = 'low'", "field 'limits.kl_mean'"),
        ("colour = 1", "field 'colour'"),
        ("[limits", "cannot be read"),
    ],
)
def test_a_bad_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(text)
    with pytest.raises(KilnError, match=message):
        limits_from_toml(path)


def test_a_missing_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(KilnError, match="cannot be read"):
        limits_from_toml(tmp_path / "none.toml")


def test_models_without_a_cache_have_conventions_of_their_own() -> None:
    found = Basis(("w8a8",), False, {"output_snr_db": 120.0, "output_max_error": 1e-6}, "sums", {"accuracy_drop": 0.05})
    assert value("embedding_cosine", GateLimits(), found) == 0.99
    assert value("accuracy_drop", GateLimits(), found) == 0.05  # one of 20
    assert value("task_drop", GateLimits(), found) == 0.01
    assert value("top1_agreement", GateLimits(), found) == 0.9
    assert value("output_snr_db", GateLimits(), found) == pytest.approx(-10 * math.log10(0.02) - 20 * math.log10(2))


def test_every_metric_has_a_law_that_is_known() -> None:
    for name in METRICS:
        for is_decoder in (True, False):
            limit_of(name, "s", GateLimits(), Basis(("w8a8",), is_decoder, dict.fromkeys(METRICS, 0.5), "x"))


def test_texts_are_cut_into_strata() -> None:
    cuts = (Cut("short", 8, 24, 4), Cut("long", 50, 50, 20))
    data = decoder_data_from_tokens([range(30), range(100, 220)], cuts, "two texts", prompts=3)
    short, long = data.strata
    assert [len(text) for text in short.texts] == [8, 8, 8]
    assert long.texts == (tuple(range(100, 150)),)
    assert [len(prompt.token_ids) for prompt in short.prompts] == [1, 2, 4]
    assert [len(prompt.token_ids) for prompt in long.prompts] == [20, 20, 20]
    assert len({prompt.token_ids for prompt in long.prompts}) == 3
    data.check(220, 50)
    with pytest.raises(KilnError, match=r"has the token 2\d\d; the model knows 0 to 199"):
        data.check(200, 50)
    with pytest.raises(KilnError, match="has 50 tokens; the model's context holds 40"):
        data.check(220, 40)
    with pytest.raises(KilnError, match="stratum 'long' needs a text of 50 tokens, the longest has 30"):
        decoder_data_from_tokens([range(30)], cuts, "one text")


def test_strata_that_cannot_be_judged_are_refused() -> None:
    with pytest.raises(KilnError, match="text 1 of stratum 'short' has 1 tokens"):
        TextStratum("short", ((1, 2), (1,)))
    with pytest.raises(KilnError, match="stratum 'short' has no text"):
        TextStratum("short", ())
    stratum = TextStratum("short", ((1, 2),))
    with pytest.raises(KilnError, match="all different"):
        DecoderData((stratum, stratum), "twice")
    assert [cut.window for cut in default_cuts(8192, 2048)] == [512, 2048, 8000]
    assert [cut.window for cut in default_cuts(512, 64)] == [64, 256, 512]
    with pytest.raises(KilnError, match="too short for a gate"):
        default_cuts(64, 64)


def test_npz_files_become_batches(tmp_path: Path) -> None:
    import numpy as np

    path = tmp_path / "images.npz"
    np.savez(path, x=np.arange(20.0).reshape(10, 2), labels=np.arange(10))
    samples = samples_from_npz(path, batch=4)
    assert [len(sample.feeds["x"]) for sample in samples] == [4, 4, 2]
    assert samples[2].labels.tolist() == [8, 9]
    np.savez(path, x=np.zeros((10, 2)), labels=np.arange(9))
    with pytest.raises(KilnError, match="x has 10, labels has 9"):
        samples_from_npz(path)
    np.savez(path, x=np.zeros((3, 2)), labels=np.zeros(3))
    with pytest.raises(KilnError, match="labels are float64"):
        samples_from_npz(path)
    path.write_text("no")
    with pytest.raises(KilnError, match=r"is no \.npz"):
        samples_from_npz(path)


def row(name: str, added: float) -> LayerRow:
    return LayerRow(name, "MatMul", 20.0, 1.0, 0.1, 1.0, added, 10)


@pytest.mark.parametrize("needed", [{"l0"}, {"l0", "l2"}, {"l4"}, {"l0", "l1", "l2", "l3", "l4"}, {"l9"}])
@pytest.mark.parametrize("trials", [0, 1, 3, 20])
def test_the_smallest_set_is_found_within_the_trials(needed: set[str], trials: int) -> None:
    ranking = rank_layers([[row(f"l{i}", 0.1 / (i + 1)) for i in range(6)], [row("same", 0.0)]])
    assert ranking == ("l0", "l1", "l2", "l3", "l4", "l5")
    tried: list[tuple[str, ...]] = []

    def trial(keep) -> Trial:
        tried.append(tuple(keep))
        return Trial(tuple(keep), () if needed <= set(keep) else ("kl_mean on long",))

    advice = advise(ranking, trial, trials)
    assert len(tried) <= trials
    assert len(set(tried)) == len(tried)
    assert advice.trials == tuple(Trial(k, () if needed <= set(k) else ("kl_mean on long",)) for k in tried)
    if advice.verified:
        assert needed <= set(advice.keep)
        assert advice.keep in tried
    if trials == 20:
        assert advice.verified == (needed <= set(ranking))
        assert not advice.verified or set(advice.keep) == needed
    assert advice.keep


def test_without_a_way_to_rebuild_the_worst_are_named() -> None:
    advice = advise(("a", "b", "c", "d", "e", "f"), None, 8)
    assert advice.keep == ("a", "b", "c", "d", "e")
    assert not advice.verified


def test_the_usual_lengths_shrink_with_the_context() -> None:
    assert generation_within(8192) == GenerationConfig()
    assert (generation_within(256).greedy, generation_within(256).continuation) == (32, 64)
    with pytest.raises(KilnError, match="ngram is 0; expected at least 1"):
        GenerationConfig(ngram=0)
