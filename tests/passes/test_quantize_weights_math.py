"""Weights as integers: rounding to nearest, GPTQ, HQQ, and the factors of SmoothQuant and AWQ."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from passes.quantization.activation_scales import awq_scales, smoothing_scales
from passes.quantization.gptq import gptq, output_error
from passes.quantization.grid import Grid, QuantisedWeight, round_to_nearest
from passes.quantization.hqq import hqq
from passes.quantization.plan import LayerPlan
from passes.quantization.weights import quantise_weight
from plugins.errors import KilnError

GRIDS = st.builds(
    Grid,
    st.sampled_from([4, 8]),
    st.sampled_from([0, 4, 16, 64]),
    st.sampled_from(["none", "integer", "real"]),
    st.booleans(),
)
SEEDS = st.integers(0, 2**32 - 1)


def problem(seed: int, depth: int = 40, width: int = 12) -> tuple[NDArray, NDArray]:
    """Weights with outliers, and second moments of activations that depend on each other, some channels large."""
    random = np.random.default_rng(seed)
    weight = (random.standard_t(3, (depth, width)) * 0.1).astype(np.float32)
    mixed = random.normal(size=(200, depth // 2)) @ random.normal(size=(depth // 2, depth))
    activations = (mixed + random.normal(size=(200, depth))) * random.lognormal(0, 1.5, depth)
    return weight, activations.T @ activations


METHODS = {
    "rtn": lambda weight, moments, grid: round_to_nearest(weight, grid),
    "gptq": gptq,
    "gptq by activation": lambda *problem: gptq(*problem, by_activation=True),
    "hqq": lambda weight, moments, grid: hqq(weight, grid),
}


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, grid=GRIDS)
def test_integers_lie_in_the_grid_and_stand_for_the_weights(method: str, seed: int, grid: Grid) -> None:
    weight, moments = problem(seed)
    found = METHODS[method](weight, moments, grid)
    assert found.integers.dtype == np.int8
    assert grid.low <= found.integers.min() <= found.integers.max() <= grid.high
    assert found.scales.shape == (12, len(list(grid.groups(40))))
    assert (found.zeros is None) == (grid.zeros == "none")
    assert 0 < found.error < 1
    if method == "rtn" and not grid.clip:
        size = grid.group_size or 40
        steps = np.repeat(found.scales.T, size, axis=0)[:40]
        reach = 1.01 if grid.zeros == "integer" else 0.51  # a zero that is rounded itself
        assert (np.abs(found.values - weight) <= reach * steps).all()


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, bits=st.sampled_from([4, 8]), group=st.sampled_from([0, 8, 16]), clip=st.booleans())
def test_weights_that_lie_on_a_grid_stay(method: str, seed: int, bits: int, group: int, clip: bool) -> None:
    grid = Grid(bits, group, clip=clip)
    weight, moments = problem(seed)
    values = round_to_nearest(weight, Grid(bits, group)).values
    again = METHODS[method](values, moments, grid)
    np.testing.assert_allclose(again.values, values, rtol=1e-5, atol=1e-7)
    assert again.error < 1e-4


def test_weights_of_a_file_with_scales_and_minimums_stay() -> None:
    """As GGUF's Q4_1 stores them: scale * (0 to 15) + minimum, for 32 weights."""
    random = np.random.default_rng(5)
    integers = random.integers(0, 16, (4, 32, 7))
    integers[:, 0], integers[:, 1] = 0, 15
    scale, least = random.uniform(0.01, 0.02, (4, 1, 7)), random.uniform(-0.3, 0.1, (4, 1, 7))
    weight = (integers * scale + least).reshape(128, 7).astype(np.float32)
    for clip in (False, True):
        np.testing.assert_allclose(round_to_nearest(weight, Grid(4, 32, "real", clip)).values, weight, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [0, 8])
def test_gptq_and_hqq_beat_rounding_in_what_they_minimise(bits: int, group: int) -> None:
    grid = Grid(bits, group)
    ratios: dict[str, list[float]] = {"gptq": [], "hqq": []}
    for seed in range(12):
        weight, moments = problem(seed)
        rounded = round_to_nearest(weight, grid).values
        ratios["gptq"].append(gptq(weight, moments, grid).error / output_error(weight, rounded, moments))
        lost = (np.abs(weight - rounded) ** 0.7).sum() / (np.abs(weight) ** 0.7).sum()
        ratios["hqq"].append(hqq(weight, grid).error / lost)
    assert np.mean(ratios["gptq"]) < 0.8
    assert max(ratios["hqq"]) <= 1 + 1e-5
    assert np.mean(ratios["hqq"]) < 1


def test_clipping_lessens_the_squared_error_at_4_bits() -> None:
    weight, _ = problem(0, 512, 16)
    assert round_to_nearest(weight, Grid(4, clip=True)).error < 0.9 * round_to_nearest(weight, Grid(4)).error


def test_dead_channels_and_zero_weights_do_no_harm() -> None:
    weight, moments = problem(1)
    weight[:, 3], weight[8:16, 5] = 0, 0
    moments[7], moments[:, 7] = 0, 0
    for method in METHODS.values():
        for grid in (Grid(4, 8), Grid(8), Grid(4, 8, "integer"), Grid(4, 8, "real")):
            found: QuantisedWeight = method(weight, moments, grid)
            assert np.isfinite(found.values).all()
            assert not found.values[:, 3].any()
    assert gptq(weight, np.zeros_like(moments), Grid(8)).error == 0


def test_what_cannot_be_quantised_is_named() -> None:
    weight, moments = problem(2)
    with pytest.raises(KilnError, match=r"layer a\.b is planned with GPTQ, which needs the second moments"):
        quantise_weight("a.b", weight, LayerPlan("w8a16", rounding="gptq"))
    with pytest.raises(KilnError, match=r"layer a\.b: second moments are \[40, 39\]"):
        quantise_weight("a.b", weight, LayerPlan("w8a16", rounding="gptq"), moments[:, :39])
    weight[0, 0] = np.nan
    with pytest.raises(KilnError, match=r"layer a\.b has weights that are not finite"):
        quantise_weight("a.b", weight, LayerPlan("w8a16"))


def test_smoothing_levels_the_channels() -> None:
    random = np.random.default_rng(0)
    activations = np.array([100, 1, 0, 4], np.float32)
    weights = [random.normal(size=(4, 6)), random.normal(size=(4, 3))]
    rows = np.abs(np.concatenate(weights, axis=1)).max(axis=1)
    half = smoothing_scales(activations, weights, 0.5)
    kept = np.array([0, 1, 3])
    np.testing.assert_allclose((activations / half)[kept], (rows * half)[kept], rtol=1e-5)
    assert half[2] == 1  # never used: nothing is known of it
    np.testing.assert_allclose((activations / smoothing_scales(activations, weights, 1.0))[kept], 1, rtol=1e-5)
    tied = smoothing_scales(activations, weights, 0.5, np.array([0, 1, 0, 1]))
    assert tied[0] == tied[2] > tied[1] == tied[3]


def test_awq_loses_less_than_rounding_alone() -> None:
    gains = []
    for seed in range(6):
        weight, moments = problem(seed)
        magnitudes = np.sqrt(np.diag(moments) / 200)
        found = awq_scales(magnitudes, [weight], [Grid(4, 8)], moments)
        assert found.error <= found.unscaled_error
        gains.append(found.error / found.unscaled_error)
        assert (found.alpha > 0) == (found.error < found.unscaled_error)
    assert np.mean(gains) < 0.9
