"""The SKU table, and which entry `cpu` means on which machine."""

import pytest

from engines import sku as module
from engines.sku import host_cpu_features, host_memory, resolve_sku, sku_table
from plugins.errors import KilnError

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


def test_every_entry_is_complete():
    table = sku_table()
    assert {"cpu-avx2", "cpu-avx512", "h200"} <= set(table)
    for name, sku in table.items():
        assert sku.name == name
        assert sku.precisions
        assert len(sku.source) > 10, "where the numbers come from"
        assert sku.backend == "onnxruntime"
        assert sku.is_cpu == bool(sku.cpu_features)
        assert sku.is_cpu or (sku.memory and sku.bandwidth and sku.peak)


def test_h200_rates_are_plausible():
    h200 = sku_table()["h200"]
    assert 130e9 < h200.memory < 160e9
    assert h200.peak["fp16"] < 1e15, "dense, not sparse"
    assert h200.peak["int8"] == pytest.approx(2 * h200.peak["fp16"], rel=1e-3)


def test_an_unknown_key_in_the_table_is_an_error(tmp_path, monkeypatch):
    table = tmp_path / "skus.toml"
    table.write_text(module.TABLE.read_text().replace("[cpu-avx512]", "speed = 3\n[cpu-avx512]"))
    monkeypatch.setattr(module, "TABLE", table)
    with pytest.raises(ValueError, match="speed"):
        sku_table.__wrapped__()


def test_cpu_resolves_on_this_machine():
    sku = resolve_sku("cpu")
    assert sku.is_cpu
    assert set(sku.cpu_features) <= host_cpu_features()


@pytest.mark.parametrize(
    ("features", "expected"), [(AVX2, "cpu-avx2"), (AVX512, "cpu-avx512"), (AVX512 - {"avx512dq"}, "cpu-avx2")]
)
def test_cpu_is_the_best_entry_that_fits(monkeypatch, features, expected):
    monkeypatch.setattr(module, "host_cpu_features", lambda: frozenset(features))
    assert resolve_sku("cpu").name == expected


@pytest.mark.parametrize("features", [set(), {"sse2", "fma"}, AVX512 - {"avx2"}])
def test_a_cpu_without_avx2_is_refused(monkeypatch, features):
    monkeypatch.setattr(module, "host_cpu_features", lambda: frozenset(features))
    with pytest.raises(KilnError, match="avx2") as caught:
        resolve_sku("cpu")
    for feature in AVX2 & features:
        assert f" {feature}" not in str(caught.value).partition(";")[0]


@pytest.mark.parametrize("name", ["", "gpu", "CPU", "h100", "cpu-avx2 "])
def test_an_unknown_sku_lists_the_known_ones(name):
    with pytest.raises(KilnError, match=f"unknown SKU '{name}'") as caught:
        resolve_sku(name)
    for known in ("cpu", *sku_table()):
        assert known in str(caught.value)


def test_memory_is_this_machines():
    assert 2**28 < host_memory() < 2**50
