"""The yardsticks of `kiln bench` give plausible figures."""

import pytest

from plugins.measure import fp32_peak, read_bandwidth, usable_cpus


def test_read_bandwidth_is_plausible() -> None:
    rate = read_bandwidth(total_bytes=64 << 20, repetitions=3)
    assert 1e8 < rate < 1e13  # bytes/s: above a slow disk, below any memory


def test_fp32_peak_grows_with_time_not_with_wishes() -> None:
    rate = fp32_peak(threads=1, seconds=0.1)
    assert 1e8 < rate < 1e12  # one core: 64 operations a cycle at 6 GHz are 4e11
    if usable_cpus() > 1:
        assert fp32_peak(seconds=0.1) < usable_cpus() * 1e12


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_and_any_size(threads: int) -> None:
    assert read_bandwidth(total_bytes=(5 << 20) + 12345, threads=threads, repetitions=1) > 0
