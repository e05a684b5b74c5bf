"""What is missing for which SKU on which machine, and the command for it. Machines are given as descriptions."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner

from engines.sku import host_cpu_features, resolve_sku, sku_table
from engines.sku_detect import Gpu, gpus_from_nvidia_smi
from pipeline import buildable, cli_doctor, doctor_facts
from pipeline.cli import kiln_group
from pipeline.doctor import commands, judge, own_skus
from pipeline.doctor_facts import Fact, Machine, complaint, inspect_machine

TABLE = sku_table()
L4 = gpus_from_nvidia_smi("0, NVIDIA L4, 23034, 8.9, 580.159.03")


def there(name: str, version: str = "1") -> Fact:
    return Fact(name, version)


def absent(name: str, problem: str = "not there") -> Fact:
    return Fact(name, None, problem)


COMPLETE = Machine(
    distribution="ubuntu",
    python="/venv/bin/python",
    is_root=False,
    cpu_features=frozenset(TABLE["cpu-avx512"].cpu_features),
    memory=2**36,
    board=None,
    gpus=tuple(L4),
    driver=there("NVIDIA driver", "580.159.03"),
    cuda=there("CUDA driver", "13.0"),
    nvcc=there("CUDA compiler"),
    compiler=there("C++ compiler"),
    runtime=there("ONNX Runtime"),
    runtime_packages=("onnxruntime-gpu 1.31.1",),
    providers=("CUDAExecutionProvider", "CPUExecutionProvider"),
    cuda_provider=there("CUDAExecutionProvider"),
    tensorrt=there("TensorRT", "11.4"),
    tensorrt_rtx=absent("TensorRT-RTX"),
    cpu_plugins=there("CPU plugins"),
    cuda_plugins=absent("CUDA plugins"),
    packages={"torch": "2.13", "onnxscript": "0.7"},
    description={"cpu": "x", "cores": "2", "memory": "64 GiB", "system": "Linux"},
)
BARE = replace(
    COMPLETE,
    distribution="debian",
    gpus=(),
    driver=absent("NVIDIA driver", "no nvidia-smi on the path"),
    nvcc=absent("CUDA compiler"),
    compiler=absent("C++ compiler"),
    runtime=absent("ONNX Runtime", "No module named 'onnxruntime'"),
    runtime_packages=(),
    providers=(),
    cuda_provider=absent("CUDAExecutionProvider"),
    tensorrt=absent("TensorRT", "no Python module tensorrt"),
    cpu_plugins=absent("CPU plugins"),
    packages={},
)


@pytest.fixture
def finished(monkeypatch):
    """As if every backend were finished: what the machine itself needs is left."""
    pairs = {(sku.backend, sku.provider) for sku in TABLE.values()}
    monkeypatch.setattr(buildable, "FINISHED", frozenset(pairs))


def missing(name: str, machine: Machine) -> dict[str, str | None]:
    return {need.name: need.command for need in judge(TABLE[name], machine).missing}


def test_a_complete_machine_lacks_nothing(finished):
    for name in ("cpu-avx2", "cpu-avx512", "l4"):
        verdict = judge(TABLE[name], COMPLETE)
        assert verdict.missing == []
        assert verdict.can("build")
        assert verdict.can("run")


def test_what_kiln_has_not_finished_is_missing_on_every_machine(monkeypatch):
    monkeypatch.setattr(buildable, "FINISHED", {("onnxruntime", "CPUExecutionProvider"), ("tensorrt", None)})
    for sku in TABLE.values():
        named = [need.problem for need in judge(sku, COMPLETE).missing if need.name == "Kiln's backend"]
        assert named == ([buildable.unfinished_backend(sku)] if sku.provider == "CUDAExecutionProvider" else [])
        assert sku.is_cpu or not judge(sku, COMPLETE).can("run")


def test_everything_missing_has_a_command_or_a_reason(finished):
    for name in TABLE:
        for need in judge(TABLE[name], BARE).missing:
            assert need.problem
            assert need.command or need.name == "GPU"


def test_commands_are_exact(finished):
    assert missing("cpu-avx2", BARE) == {"ONNX Runtime": "/venv/bin/python -m pip install 'onnxruntime>=1.31'"}
    found = missing("l4", BARE)
    assert found["NVIDIA driver"] == "sudo apt-get install -y cuda-drivers"
    assert found["ONNX Runtime with CUDA"] == "/venv/bin/python -m pip install 'onnxruntime-gpu[cuda,cudnn]>=1.31'"
    assert found["C++ compiler"] == "sudo apt-get install -y g++"
    assert found["CUDA compiler"].startswith("/venv/bin/python -m pip install 'cuda-toolkit[nvcc,")
    assert missing("t4", BARE)["TensorRT"] == "/venv/bin/python -m pip install 'tensorrt>=10.13'"
    assert missing("jetson-orin", BARE)["TensorRT"] == "sudo apt-get install -y tensorrt python3-libnvinfer"
    assert missing("l4", replace(BARE, distribution="fedora", is_root=True))["C++ compiler"] == "dnf install -y gcc-c++"
    assert missing("l4", replace(BARE, distribution="nixos"))["C++ compiler"] is None, "no command is guessed"


@pytest.mark.parametrize("distribution", ["debian", "ubuntu", "fedora", "suse", "arch", "alpine", ""])
def test_commands_are_shell(finished, distribution):
    machine = replace(BARE, distribution=distribution)
    for command in commands([judge(sku, machine) for sku in TABLE.values()]):
        subprocess.run(["sh", "-n", "-c", command], check=True)
        assert shlex.split(command.partition("&&")[0])


def test_a_command_for_all_comes_once(finished):
    verdicts = [judge(TABLE[name], BARE) for name in ("l4", "h200", "a10")]
    assert len(commands(verdicts)) == len(set(commands(verdicts))) == len(commands(verdicts[:1]))


def test_the_cpu_runtime_is_replaced_where_cuda_is_wanted(finished):
    machine = replace(COMPLETE, runtime_packages=("onnxruntime 1.32.0",), providers=("CPUExecutionProvider",))
    assert missing("l4", machine) == {
        "ONNX Runtime with CUDA": "/venv/bin/python -m pip uninstall -y onnxruntime && "
        "/venv/bin/python -m pip install 'onnxruntime-gpu[cuda,cudnn]>=1.31'"
    }
    assert missing("cpu-avx2", machine) == {}


def test_two_runtimes_overwrite_each_other(finished):
    machine = replace(COMPLETE, runtime_packages=("onnxruntime 1.32.0", "onnxruntime-gpu 1.31.1"))
    for name in ("cpu-avx2", "l4"):
        (need,) = judge(TABLE[name], machine).missing
        assert "overwrite each other's files" in need.problem
        assert "pip uninstall -y onnxruntime onnxruntime-gpu && " in need.command


def test_a_provider_that_does_not_load_needs_its_libraries(finished):
    machine = replace(COMPLETE, cuda_provider=absent("CUDA", "libcublasLt.so.13 cannot be found"))
    (need,) = judge(TABLE["l4"], machine).missing
    assert "libcublasLt.so.13 cannot be found" in need.problem
    assert "export LD_LIBRARY_PATH=$(" in need.command


def test_an_old_driver(finished):
    (need,) = judge(TABLE["l4"], replace(COMPLETE, driver=there("NVIDIA driver", "535.161.08"))).missing
    assert need.problem == "found 535.161.08, but CUDA 13 needs 580 or newer"
    assert need.command == "sudo ubuntu-drivers install nvidia:580"


def test_another_gpu_is_not_the_one(finished):
    assert missing("h200", COMPLETE) == {"GPU": None}
    assert "this machine's GPU is NVIDIA L4" in judge(TABLE["h200"], COMPLETE).missing[0].problem


def test_without_a_gpu_it_builds_what_onnx_runtime_runs_and_nothing_of_tensorrt(finished):
    bare = replace(
        COMPLETE,
        gpus=(),
        driver=absent("NVIDIA driver"),
        providers=("CPUExecutionProvider",),
        tensorrt=there("TensorRT"),
    )
    for name, builds in (("l4", True), ("h200", True), ("t4", False)):
        verdict = judge(TABLE[name], bare)
        assert (verdict.can("build"), verdict.can("run")) == (builds, False), name


def test_without_nvcc_it_runs_and_does_not_build(finished):
    verdict = judge(TABLE["l4"], replace(COMPLETE, nvcc=absent("CUDA compiler")))
    assert (verdict.can("build"), verdict.can("run")) == (False, True)
    compiled = replace(COMPLETE, nvcc=absent("CUDA compiler"), cuda_plugins=there("CUDA plugins"))
    assert judge(TABLE["l4"], compiled).can("build")


def test_a_cpu_without_the_instructions(finished):
    machine = replace(COMPLETE, cpu_features=frozenset(TABLE["cpu-avx2"].cpu_features))
    assert judge(TABLE["cpu-avx2"], machine).can("run")
    (need,) = judge(TABLE["cpu-avx512"], machine).missing
    assert "lacks avx512bw, avx512dq, avx512f, avx512vl" in need.problem
    assert own_skus(list(TABLE.values()), machine) == ["cpu-avx2", "l4"]


def test_a_t4_with_tensorrt_builds_what_is_no_decoder():
    t4 = gpus_from_nvidia_smi("0, Tesla T4, 15360, 7.5, 580.159.03")
    verdict = judge(TABLE["t4"], replace(COMPLETE, gpus=tuple(t4)))
    assert verdict.can("build")


def test_decoders_on_a_t4_have_no_plugin(finished):
    optional = {need.name: need.problem for need in judge(TABLE["t4"], COMPLETE).optional if not need.met}
    assert "--attention native" in optional["attention plugin, for decoders"]
    assert "needs sm_80 or newer" in optional["attention plugin, for decoders"]


def test_a_jetson(finished):
    board = "NVIDIA Jetson AGX Orin Developer Kit"
    machine = replace(COMPLETE, board=board, gpus=(Gpu(0, board, TABLE["jetson-orin"].memory, None, "540.4.0"),))
    assert judge(TABLE["jetson-orin"], replace(machine, driver=there("NVIDIA driver", "540.4.0"))).missing == []


def test_this_machine_is_inspected():
    machine = inspect_machine()
    assert machine.cpu_features == host_cpu_features()
    assert machine.runtime.ok
    assert "CPUExecutionProvider" in machine.providers
    assert machine.python == sys.executable
    assert all(fact.ok or fact.problem for fact in machine.facts())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "W: x\nerror: libcudart.so.13: cannot open shared object file: No such file\nend",
            "libcudart.so.13 cannot be found",
        ),
        ("Traceback\n\x1b[31mImportError: numpy\x1b[0m\n", "ImportError: numpy"),
        ("", ""),
    ],
)
def test_what_a_child_complains_of(text, expected):
    assert complaint(text) == expected


@pytest.mark.parametrize(
    ("code", "found", "problem"),
    [
        ("print('9.1')", "9.1", ""),
        ("import os; os.abort()", None, "the process died of signal 6"),
        ("raise SystemExit(3)", None, "exit code 3"),
        ("raise ImportError('no libnvinfer')", None, "ImportError: no libnvinfer"),
    ],
)
def test_a_library_that_breaks_its_process_is_a_fact(code, found, problem):
    assert doctor_facts._run([sys.executable, "-c", code]) == (found, problem)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('ID=debian\nVERSION_ID="12"\n', "debian"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', "fedora"),
        ("ID=linuxmint\nID_LIKE='ubuntu debian'\n".replace("'", '"'), "ubuntu"),
        ("ID=nixos\n", "nixos"),
        ("", ""),
    ],
)
def test_the_distribution(tmp_path, text, expected):
    (tmp_path / "os-release").write_text(text)
    assert doctor_facts._distribution(tmp_path / "os-release") == expected
    assert doctor_facts._distribution(tmp_path / "absent") == ""


def test_the_command_on_this_machine():
    result = CliRunner().invoke(kiln_group, ["doctor", "--sku", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["skus"] == [
        {"sku": resolve_sku("cpu").name, "builds": True, "runs": True, "missing": [], "optional": []}
    ]
    assert resolve_sku("cpu").name in document["own_skus"]
    assert {fact["name"] for fact in document["installed"]} >= {"NVIDIA driver", "TensorRT", "CUDA plugins", "torch"}


def test_the_exit_code_is_about_the_named_skus(monkeypatch):
    monkeypatch.setattr(cli_doctor, "inspect_machine", lambda: COMPLETE)
    run = CliRunner().invoke
    assert run(kiln_group, ["doctor"]).exit_code == 0
    assert run(kiln_group, ["doctor", "--sku", "cpu-avx2"]).exit_code == 0
    refused = run(kiln_group, ["doctor", "--sku", "cpu-avx2", "--sku", "h200"])
    assert refused.exit_code == 1
    assert "this machine's GPU is NVIDIA L4" in refused.stdout


def test_the_tables_show_what_to_do(monkeypatch, finished):
    monkeypatch.setattr(cli_doctor, "inspect_machine", lambda: BARE)
    one = CliRunner().invoke(kiln_group, ["doctor", "--sku", "l4"])
    assert one.exit_code == 1
    assert "For l4, run:\n  sudo apt-get install -y cuda-drivers\n" in one.stdout
    every = CliRunner().invoke(kiln_group, ["doctor"]).stdout
    assert all(name in every for name in TABLE)
    assert "pip install" not in every, "commands for all at once contradict each other"
