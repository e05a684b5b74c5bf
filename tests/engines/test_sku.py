"""The SKU table, and which entry `cpu` means on which machine."""

import re

import pytest

from engines import sku as module
from engines.sku import host_cpu_features, host_memory, resolve_sku, sku_table, skus_from_file
from plugins.cuda_build import ARCHITECTURES
from plugins.errors import KilnError

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


NAMES = [
    *(
        "cpu-avx2",
        "cpu-avx512",
        "t4",
        "a10",
        "a100-40",
        "a100-80",
        "l4",
        "l40s",
        "h100-pcie",
        "h100-sxm",
        "h200",
        "b200",
    ),
    *("rtx-3090", "rtx-4090", "rtx-5090", "rtx-pro-6000", "jetson-orin"),
]
GPUS = [name for name in NAMES if not name.startswith("cpu")]
ENTRY = """
[my-gpu]
arch = "sm_89"
backend = "onnxruntime"
provider = "CUDAExecutionProvider"
precisions = ["fp32", "fp16"]
memory = 21474836480
source = "the card's data sheet"
"""


def test_the_table_has_the_machine_types_that_are_promised():
    assert list(sku_table()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_is_complete(name):
    sku = sku_table()[name]
    assert sku.name == name
    assert sku.title
    assert re.search(r"20\d\d|psABI", sku.source), "a source by title and year"
    assert sku.is_cpu == bool(sku.cpu_features) == (sku.capability is None)
    assert sku.is_cpu or (sku.memory and sku.bandwidth and sku.names and sku.options and "fp32" in sku.peak)
    left_out = set(sku.precisions) - set(sku.peak)
    assert sku.is_cpu or not left_out or "left out" in sku.source, f"no peak for {left_out}, and nothing said of it"


@pytest.mark.parametrize("name", GPUS)
def test_rates_are_dense_and_in_proportion(name):
    """Tensor cores do integers of half the width at twice the rate; a sparse figure by mistake would show."""
    peak = sku_table()[name].peak
    full_rate = peak["fp16"] * (2 if name.startswith("rtx-") and name != "rtx-pro-6000" else 1)
    assert peak["int8"] == pytest.approx(2 * full_rate, rel=0.02), "GeForce adds FP16 up in FP32 at half rate"
    assert peak.get("bf16", peak["fp16"]) == peak["fp16"]
    if "fp8" in peak:
        assert peak["fp8"] == pytest.approx(2 * peak["fp16"], rel=0.02)
    if "fp4" in peak:
        assert peak["fp4"] == pytest.approx(2 * full_rate * 2, rel=0.02)
    if "tf32" in peak:
        assert peak["tf32"] == pytest.approx(peak["fp16"] / 2, rel=0.03)


def test_no_two_gpus_share_a_name():
    names = [name for sku in sku_table().values() for name in sku.names]
    assert len(names) == len(set(names))


def test_the_plugin_is_compiled_for_every_gpu_that_runs_it():
    """PTX of every architecture in the table is compiled in tests/plugins."""
    architectures = {sku.arch for sku in sku_table().values() if not sku.is_cpu}
    without = {sku.name for sku in sku_table().values() if not sku.runs_attention_plugin}
    assert without == {"t4"}
    assert architectures - {"sm_75"} == set(ARCHITECTURES)


def test_an_entry_of_ones_own(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(ENTRY + '[my-slice]\nlike = "h100-sxm"\nmemory = 9_000_000_000\nsource = "MIG 1g.10gb, measured"\n')
    table = skus_from_file(file)
    assert list(table) == [*NAMES, "my-gpu", "my-slice"]
    assert resolve_sku("my-gpu", file).bandwidth is None
    mine, whole = table["my-slice"], table["h100-sxm"]
    assert (mine.memory, mine.peak, mine.arch) == (9_000_000_000, whole.peak, whole.arch)
    assert mine.names == ()
    assert mine.source == "MIG 1g.10gb, measured"
    assert "my-gpu" not in sku_table()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            ENTRY + "bandwith = 3e11",
            "own.toml: SKU my-gpu: key bandwith: Extra inputs are not permitted; keys are title",
        ),
        (ENTRY.replace("memory = 21474836480", ""), "SKU my-gpu: .*a GPU needs memory"),
        (ENTRY.replace("21474836480", '"much"'), "SKU my-gpu: key memory: .*valid integer"),
        (ENTRY.replace("21474836480", "-1"), "SKU my-gpu: key memory: .*greater than 0"),
        (ENTRY + "bandwidth = inf", "SKU my-gpu: key bandwidth: .*finite"),
        (ENTRY.replace("sm_89", "ada"), "SKU my-gpu: key arch: .*pattern"),
        (ENTRY.replace('"fp16"', '"fp12"'), "SKU my-gpu: key precisions.1: "),
        (ENTRY.replace('["fp32", "fp16"]', "[]"), "SKU my-gpu: key precisions: "),
        (ENTRY + "peak = { int8 = 1e12 }", "SKU my-gpu: .*peak has int8, which precisions has not"),
        (ENTRY + "peak = { fp16 = 0 }", "SKU my-gpu: .*peak of fp16 is 0.0"),
        (
            ENTRY + 'plugin_architectures = ["sm_90"]',
            "has sm_90; expected some of sm_80, sm_86, sm_87, sm_89 for sm_89",
        ),
        (ENTRY.replace("the card's data sheet", ""), "SKU my-gpu: key source: "),
        (ENTRY.replace("CUDAExecutionProvider", "CPUExecutionProvider"), "are not of one machine"),
        (ENTRY.replace("onnxruntime", "tensorrt"), "no other backend has one"),
        (
            '[x]\nlike = "t4"\nsource = "a data sheet"\noptions = { level = 3 }',
            "SKU x: key options: TensorRT has no option level",
        ),
        (
            '[x]\nlike = "t4"\nsource = "a data sheet"\noptions = { optimization_level = 9 }',
            "SKU x: key options: .* is 9",
        ),
        (ENTRY.replace("onnxruntime", "tvm"), "SKU my-gpu: key backend: "),
        (ENTRY.replace("[my-gpu]", "[l4]"), "SKU l4: the name is taken"),
        (ENTRY.replace("[my-gpu]", "[cpu]"), "SKU cpu: bad name"),
        (ENTRY.replace("[my-gpu]", '["../up"]'), "SKU ../up: bad name"),
        ('[a]\nlike = "b"\nsource = "a data sheet"', "SKU a: like is 'b'; expected one of cpu-avx2"),
        ("a = 3", "a is not a table"),
        ("[a", "is not TOML"),
        ("", "is empty"),
    ],
    ids=lambda value: None if "\n" in value else value[:40],
)
def test_a_bad_file_names_file_sku_and_key(tmp_path, text, message):
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(KilnError, match=message) as caught:
        skus_from_file(file)
    assert str(file) in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(KilnError, match=r"cannot read the SKU file .*absent.toml: No such file"):
        skus_from_file(tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KilnError, match="is not TOML"):
        resolve_sku("cpu", tmp_path / "binary.toml")


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
