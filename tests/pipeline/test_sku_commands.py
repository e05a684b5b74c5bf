"""`kiln sku`: list, show, detect, forecast; and --sku-file where --sku is taken."""

import json

import pytest
from click.testing import CliRunner

from engines import sku_detect
from engines.sku import host_cpu_features, resolve_sku, sku_table
from pipeline.cli import build_engine_command, kiln_group
from plugins.errors import KilnError

OWN = """
[my-gpu]
like = "l4"
names = ["NVIDIA A10G"]
arch = "sm_86"
plugin_architectures = ["sm_86"]
memory = 24_146_608_128
source = "A10G data sheet"
"""


def kiln(*words: object):
    return CliRunner().invoke(kiln_group, [str(word) for word in words], catch_exceptions=True)


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(OWN)
    return file


def test_list():
    text = kiln("sku", "list").stdout
    assert all(name in text for name in sku_table())
    assert json.loads(kiln("sku", "list", "--json").stdout)[2]["name"] == "t4"


def test_list_with_ones_own(own):
    names = [entry["name"] for entry in json.loads(kiln("sku", "list", "--sku-file", own, "--json").stdout)]
    assert names == [*sku_table(), "my-gpu"]


def test_show():
    text = kiln("sku", "show", "jetson-orin").stdout
    assert "technical brief, 2022" in text
    assert "tf32, bf16" in text, "what is unknown is named"
    assert json.loads(kiln("sku", "show", "cpu", "--json").stdout)["name"] == resolve_sku("cpu").name


def test_detect_another_machine(tmp_path, own):
    answer = tmp_path / "answer"
    answer.write_text("0, NVIDIA L4, 23034, 8.9, 580.1\n1, NVIDIA A10G, 23028, 8.6, 580.1\n")
    result = kiln("sku", "detect", "--nvidia-smi", answer)
    assert result.exit_code == 0
    assert "gpu 0: l4 (NVIDIA L4, sm_89, 22.5 GiB)" in result.stdout
    assert "gpu 1: no SKU (NVIDIA A10G, sm_86, 22.5 GiB); no SKU has the name 'NVIDIA A10G'" in result.stdout
    assert '\n[a10g]\nlike = "a10"\n' in result.stdout
    document = json.loads(kiln("sku", "detect", "--nvidia-smi", answer, "--sku-file", own, "--json").stdout)
    assert [gpu["sku"] for gpu in document["gpus"]] == ["l4", "my-gpu"]
    assert document["cpu"] is None


def test_detect_nothing_is_an_exit_code(tmp_path):
    (tmp_path / "answer").write_text("0, Tesla V100-SXM2-16GB, 16384, 7.0, 550.1\n")
    assert kiln("sku", "detect", "--nvidia-smi", tmp_path / "answer").exit_code == 1
    (tmp_path / "answer").write_text("")
    assert kiln("sku", "detect", "--nvidia-smi", tmp_path / "answer").exit_code == 1


@pytest.mark.parametrize("content", ["No devices were found", b"\xff\xfe", None])
def test_detect_refuses_what_nvidia_smi_never_printed(tmp_path, content):
    answer = tmp_path / "answer"
    if content is not None:
        answer.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = kiln("sku", "detect", "--nvidia-smi", answer)
    assert isinstance(result.exception, KilnError)


@pytest.mark.skipif(not host_cpu_features() >= {"avx2"}, reason="this CPU is of no SKU")
def test_detect_this_machines_cpu():
    result = kiln("sku", "detect")
    assert result.exit_code == 0
    assert f"cpu: {resolve_sku('cpu').name}" in result.stdout
    try:
        gpus = sku_detect.own_gpus()
    except sku_detect.NoDriverError:
        gpus = []
    assert result.stdout.count("\ngpu") == (len(gpus) or 1)


def test_forecast(tiny_llama_bundle, tiny_llama_folder):
    text = kiln("sku", "forecast", tiny_llama_bundle.path).stdout
    assert all(name in text for name, sku in sku_table().items() if not sku.is_cpu)
    assert "plugin-free" in text
    options = ("--precision", "fp16", "--kv-dtype", "float16", "--max-context", "200", "--json")
    (forecast,) = json.loads(kiln("sku", "forecast", tiny_llama_folder, "--sku", "l4", *options).stdout)
    assert forecast["roofline"]["precision"] == "fp16"
    assert list(forecast["sequences"]) == ["200"]
    table = kiln("sku", "forecast", tiny_llama_folder, "--sku", "t4", "--precision", "bf16").stdout
    assert "does not multiply bf16" in " ".join(table.split())
    assert "prefill" in table


@pytest.mark.parametrize(
    "command", ["optimize", "bisect", "doctor", "sku forecast", "sku list", "sku show", "sku detect"]
)
def test_a_bad_sku_file_is_named_everywhere(tmp_path, command):
    file = tmp_path / "bad.toml"
    file.write_text(OWN.replace("like", "liek"))
    words = {
        "optimize": ["absent.onnx", "--out", "x.onnx"],
        "bisect": ["absent.onnx"],
        "sku forecast": ["absent.onnx"],
        "sku show": ["l4"],
    }
    result = kiln(*command.split(), *words.get(command, []), "--sku-file", file)
    assert isinstance(result.exception, KilnError), result.output
    assert not isinstance(result.exception, SystemExit)


def test_build_engine_takes_a_sku_file(tiny_llama_folder, own, tmp_path):
    words = [str(tiny_llama_folder), "--sku", "my-gpu", "--sku-file", str(own), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(build_engine_command, words)
    assert isinstance(result.exception, KilnError)
    assert "the attention of my-gpu is built for 64, 96, 128, 256" in str(result.exception)  # the model's are of 16
    assert "forecast for my-gpu" in result.stderr


def test_a_page_of_forecasts(tiny_llama_bundle, tmp_path):
    page = tmp_path / "page.html"
    assert kiln("sku", "forecast", tiny_llama_bundle.path, "--html", page).exit_code == 0
    text = page.read_text()
    assert text.count("<svg") == 2
    assert "At 256 tokens, in tokens/s" in text
    assert all(name in text for name, sku in sku_table().items() if not sku.is_cpu)
    assert kiln("sku", "forecast", tiny_llama_bundle.path, "--sku", "cpu", "--html", page).exit_code == 0
    assert "<svg" not in page.read_text(), "a CPU's rates are unknown: nothing to draw"
