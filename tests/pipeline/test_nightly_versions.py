"""`kiln nightly` with one version of ONNX Runtime, then with another: it notices, builds again, and judges. Opt-in."""

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cryptography")
pytest.importorskip("onnxruntime")

from engines.sku import host_cpu_features

OTHER = "1.31.1"
"""The version before the one that constraints.txt names; the first that the package's floor allows."""
MODELS = ("mlp", "conv", "embedding", "norm")


@pytest.fixture(scope="module")
def other_version(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but that version in it."""
    if "versions" not in request.config.getoption("-m"):
        pytest.skip("opt-in: -m versions")
    if importlib.metadata.version("onnxruntime") == OTHER:
        pytest.skip(f"onnxruntime {OTHER} is what is installed")
    folder = tmp_path_factory.mktemp("onnxruntime")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    subprocess.run([*install, f"onnxruntime=={OTHER}"], check=True)
    return folder


def night(config: Path, *paths: Path) -> dict:
    """The report of a run in a process of its own, with `paths` before the installed packages."""
    result = subprocess.run(
        [Path(sys.executable).with_name("kiln"), "nightly", config, "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    )
    assert result.stdout, result.stderr
    report = json.loads(result.stdout)
    assert report["exit_code"] == result.returncode
    return report


@pytest.mark.versions
@pytest.mark.skipif(not {"avx2", "fma"} <= host_cpu_features(), reason="engines are built for AVX2")
def test_another_version_of_onnx_runtime_is_noticed_and_judged(
    other_version: Path, world: Callable, tmp_path: Path
) -> None:
    made = world(*MODELS)
    here = importlib.metadata.version("onnxruntime")
    before = night(made.path, other_version)
    assert before["versions"]["onnxruntime"] == OTHER
    assert [job["status"] for job in before["jobs"]] == ["promoted"] * len(MODELS)
    made.make_stable()
    after = night(made.path)
    assert after["versions"]["onnxruntime"] == here
    for job in after["jobs"]:
        found = {case["name"]: case for case in job["cases"]}
        assert job["changes"]["backend"] == f"onnxruntime {OTHER} -> onnxruntime {here}"
        assert {"build", "upload", "verify stable", "accuracy", "determinism", "speed"} <= set(found)
        assert found["accuracy"]["status"] == "passed", job
        assert "as they were when it was built" in found["determinism"]["text"]
        held = {"determinism", "speed"} & {name for name, case in found.items() if case["status"] == "failed"}
        assert job["status"] == ("held back" if held else "promoted"), job
        print(job["model"], job["status"], found["determinism"]["text"], found["speed"]["text"], sep="; ")
    assert all(job["stable"] == 1 for job in after["jobs"])
    again = night(made.path)
    assert [job["version"] for job in again["jobs"]] == [2] * len(MODELS), "nothing is built again"
    assert {case["name"] for job in again["jobs"] for case in job["cases"]} == {"gates"}
