"""Which SKU a machine is, from what nvidia-smi prints and what a Jetson's device tree says."""

import json
import stat
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import sku_detect as module
from engines.sku import sku_table, skus_from_file
from engines.sku_detect import (
    Gpu,
    NoDriverError,
    gpus_from_nvidia_smi,
    jetson_from_device_tree,
    match_gpu,
    own_gpus,
    query_gpus,
    toml_from_gpu,
)
from plugins.errors import KilnError

# As printed by driver 535 to 595, one line of each machine type.
PRINTED = {
    "t4": "0, Tesla T4, 15360, 7.5, 550.54.14",
    "a10": "0, NVIDIA A10, 23028, 8.6, 535.161.08",
    "a100-40": "0, NVIDIA A100-SXM4-40GB, 40960, 8.0, 580.95.05",
    "a100-80": "0, NVIDIA A100 80GB PCIe, 81920, 8.0, 595.71.05",
    "l4": "0, NVIDIA L4, 23034, 8.9, 580.159.03",
    "l40s": "0, NVIDIA L40S, 46068, 8.9, 580.95.05",
    "h100-pcie": "0, NVIDIA H100 PCIe, 81559, 9.0, 570.211.01",
    "h100-sxm": "0, NVIDIA H100 80GB HBM3, 81559, 9.0, 580.82.07",
    "h200": "0, NVIDIA H200, 143771, 9.0, 580.159.04",
    "b200": "0, NVIDIA B200, 183359, 10.0, 580.126.09",
    "rtx-3090": "0, NVIDIA GeForce RTX 3090, 24576, 8.6, 580.65.06",
    "rtx-4090": "0, NVIDIA GeForce RTX 4090, 24564, 8.9, 550.90.07",
    "rtx-5090": "0, NVIDIA GeForce RTX 5090, 32607, 12.0, 595.71.05",
    "rtx-pro-6000": "0, NVIDIA RTX PRO 6000 Blackwell Server Edition, 97887, 12.0, 580.178.04",
}


def only(text: str) -> Gpu:
    (gpu,) = gpus_from_nvidia_smi(text)
    return gpu


@pytest.mark.parametrize("name", PRINTED)
def test_every_gpu_of_the_table_is_found(name):
    assert match_gpu(only(PRINTED[name]), sku_table()).sku == sku_table()[name]


def test_every_gpu_of_the_table_is_tried():
    assert {*PRINTED, "jetson-orin"} == {name for name, sku in sku_table().items() if not sku.is_cpu}


def test_headers_units_and_several_gpus():
    text = "index, name, memory.total [MiB], compute_cap, driver_version\n0, NVIDIA L4, 23034 MiB, 8.9, 580.1\n\n"
    text += "1, NVIDIA H200, 143771 MiB, 9.0, 580.1\n"
    gpus = gpus_from_nvidia_smi(text)
    assert gpus[0] == Gpu(0, "NVIDIA L4", 23034 * 2**20, "sm_89", "580.1")
    assert [match_gpu(gpu, sku_table()).sku.name for gpu in gpus] == ["l4", "h200"]
    assert gpus_from_nvidia_smi("") == []


@pytest.mark.parametrize(
    "text", ["Failed to initialize NVML: Driver/library version mismatch", "0, NVIDIA L4", "a, b, 1, 2, 3"]
)
def test_what_is_not_the_query_is_refused(text):
    with pytest.raises(KilnError, match="expected what this prints: nvidia-smi --query-gpu="):
        gpus_from_nvidia_smi(text)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text):
    try:
        gpus = gpus_from_nvidia_smi(text)
    except KilnError:
        return
    for gpu in gpus:
        match = match_gpu(gpu, sku_table())
        assert (match.sku is None) == bool(match.reason)


def test_a_slice_of_a_gpu_is_not_the_gpu():
    match = match_gpu(only("0, NVIDIA H100 80GB HBM3, 9984, 9.0, 580.1"), sku_table())
    assert match.sku is None
    assert "h100-sxm is sm_90 with 81559 MiB: a slice of a GPU" in match.reason


def test_small_differences_of_memory_are_the_drivers():
    assert match_gpu(only("0, Tesla T4, 15109, 7.5, 470.1"), sku_table()).sku.name == "t4"
    assert match_gpu(only("0, NVIDIA A10, 24564, 8.6, 550.1"), sku_table()).sku.name == "a10", "ECC off"


def test_an_unknown_gpu_gets_an_entry_to_complete(tmp_path):
    gpu = only('0, NVIDIA A10G "x", 23028, 8.6, 550.1')
    match = match_gpu(gpu, sku_table())
    assert match.sku is None
    assert "of its architecture sm_86 are a10, rtx-3090" in match.reason
    entry = toml_from_gpu(gpu, sku_table())
    file = tmp_path / "own.toml"
    file.write_text(entry)
    with pytest.raises(KilnError, match=r"key bandwidth: .*greater than 0"):
        skus_from_file(file)  # what only a data sheet says must be filled in
    file.write_text(
        entry.replace("0.0", "6e11")
        .replace('source = ""', 'source = "A10G data sheet"')
        .replace("{}", "{ fp16 = 7e13 }")
    )
    own = skus_from_file(file)
    (name,) = tomllib.loads(entry)
    assert match_gpu(gpu, own).sku == own[name]
    assert own[name].peak == {"fp16": 7e13}


def test_no_entry_for_an_architecture_that_nobody_knows():
    gpu = only("0, Tesla V100-SXM2-16GB, 16384, 7.0, 550.1")
    assert toml_from_gpu(gpu, sku_table()) is None
    assert "none is sm_70" in match_gpu(gpu, sku_table()).reason


def test_a_jetson_is_known_by_its_board(tmp_path, monkeypatch):
    tree = tmp_path / "model"
    tree.write_bytes(b"NVIDIA Jetson AGX Orin Developer Kit\0")
    assert jetson_from_device_tree(tree) == "NVIDIA Jetson AGX Orin Developer Kit"
    monkeypatch.setattr(module, "jetson_from_device_tree", lambda: "NVIDIA Jetson AGX Orin Developer Kit")
    monkeypatch.setattr(module, "query_gpus", lambda: [only("0, Orin (nvgpu), [N/A], 8.7, 540.4.0")])
    monkeypatch.setattr(module, "host_memory", lambda: 62841 * 2**20)
    (match,) = (match_gpu(gpu, sku_table()) for gpu in own_gpus())
    assert match.sku.name == "jetson-orin"
    assert match.gpu.driver == "540.4.0"
    monkeypatch.setattr(module, "host_memory", lambda: 30000 * 2**20)
    assert match_gpu(own_gpus()[0], sku_table()).sku is None, "the module with half the memory"


def test_other_boards_are_no_jetson(tmp_path):
    (tmp_path / "model").write_bytes(b"Raspberry Pi 5 Model B Rev 1.0\0")
    assert jetson_from_device_tree(tmp_path / "model") is None
    assert jetson_from_device_tree(tmp_path / "absent") is None


def script(folder, body: str) -> list[str]:
    path = folder / "query"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return [str(path)]


def test_the_driver_is_asked(tmp_path):
    assert [gpu.name for gpu in query_gpus(script(tmp_path, f"echo {json.dumps(PRINTED['l4'])}"))] == ["NVIDIA L4"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "echo 'NVIDIA-SMI has failed because it could not talk to the driver'; exit 9",
            "code 9: NVIDIA-SMI has failed",
        ),
        ("kill -9 $$", "failed with code -9"),
    ],
)
def test_a_driver_that_fails_is_named(tmp_path, body, message):
    with pytest.raises(NoDriverError, match=message):
        query_gpus(script(tmp_path, body))


def test_no_driver():
    with pytest.raises(NoDriverError, match="no nvidia-smi-that-is-not-there on the path"):
        query_gpus(["nvidia-smi-that-is-not-there"])
