"""Every call of TensorRT that Kiln declares, and so can make, exists with that signature in the real Python modules."""

import inspect
import json
import types
from pathlib import Path

import pytest

from engines.backends.tensorrt import api
from engines.backends.tensorrt.api import CLASSES, ENUMERATIONS, OLDEST, TensorRt, tensorrt_module
from engines.backends.tensorrt.options import TensorRtOptions
from plugins.errors import KilnError

CALLBACKS = {"ILogger.log", "IProgressMonitor.phase_start", "IProgressMonitor.step_complete"}
HERE = Path(__file__).parent


def declared() -> dict[str, inspect.Signature | None]:
    """Each member of our declarations, as `Class.member`; None for attributes and properties."""
    found: dict[str, inspect.Signature | None] = {}
    for kind in CLASSES:
        for name, value in vars(kind).items():
            if callable(value) and (not name.startswith("_") or name == "__init__"):
                own = inspect.signature(value)
                if name != "__init__" or "logger" in own.parameters:  # else it is the one that Protocol gives
                    found[f"{kind.__name__}.{name}"] = own
            elif isinstance(value, property):
                found[f"{kind.__name__}.{name}"] = None
        for name in inspect.get_annotations(kind):
            found[f"{kind.__name__}.{name}"] = None
    return found


def names_of(signature: inspect.Signature) -> list[str]:
    return [name for name in signature.parameters if name != "self"]


@pytest.mark.slow
@pytest.mark.parametrize("version", ["tensorrt_11", "tensorrt_10"])
def test_every_declared_call_exists_with_its_signature(version: str, request: pytest.FixtureRequest) -> None:
    harness, ours = request.getfixturevalue(version), declared()
    assert len(ours) > 50
    done = harness.run(str(HERE / "signatures.py"), *ours)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["version"].startswith(version.removeprefix("tensorrt_"))
    wrong = []
    for name, signature in ours.items():
        real = answer["members"][name]
        if real is None:
            wrong.append(f"{name} is missing")
        elif signature is None:
            if real["kind"] != "property":
                wrong.append(f"{name} is a {real['kind']}")
        elif not any(accepts(overload, signature) for overload in real["signatures"]):
            wrong.append(f"{name}{signature} against {real['signatures']}")
    assert wrong == []


def accepts(overload: dict, ours: inspect.Signature) -> bool:
    """Whether an overload takes what our declaration passes, by position and by name, and gives what it says."""
    names = names_of(ours)
    required = [name for name in overload["names"] if name not in overload["optional"]]
    return overload["names"][: len(names)] == names and len(required) <= len(names) and same_result(overload, ours)


def same_result(overload: dict, ours: inspect.Signature) -> bool:
    """TensorRT's own classes by their names; what we declare as Any passes, and Sequence for dimensions."""
    given = ours.return_annotation
    if isinstance(given, types.UnionType):
        given = given.__args__[0]
    given = getattr(given, "__origin__", given)
    name = "None" if given is None else getattr(given, "__name__", str(given))
    result = overload["result"].split("[")[0].removeprefix("nvonnxparser::I")
    return name in (result, "Any") or (name, result) == ("Sequence", "Dims")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["tensorrt_11", "tensorrt_10"])
def test_every_enumeration_has_the_members_that_are_used(version: str, request: pytest.FixtureRequest) -> None:
    harness = request.getfixturevalue(version)
    wanted = [f"{kind}.{member}" for kind, members in ENUMERATIONS.items() for member in members]
    answer = json.loads(harness.run(str(HERE / "signatures.py"), *wanted).stdout)
    assert [name for name, found in answer["members"].items() if found is None] == []


@pytest.mark.slow
def test_settable_properties_can_be_set(tensorrt_11) -> None:
    kinds = (api.IBuilderConfig, api.IExecutionContext)
    names = [f"{kind.__name__}.{name}" for kind in kinds for name in inspect.get_annotations(kind)]
    answer = json.loads(tensorrt_11.run(str(HERE / "signatures.py"), *names).stdout)
    assert [name for name, found in answer["members"].items() if not found["settable"]] == []


@pytest.mark.slow
def test_a_call_that_does_not_exist_is_found(tensorrt_11) -> None:
    """The contract test's own test: what TensorRT 11 no longer has is missing."""
    gone = ["BuilderFlag.FP16", "BuilderFlag.INT8", "IBuilderConfig.int8_calibrator", "Builder.platform_has_fast_fp16"]
    answer = json.loads(tensorrt_11.run(str(HERE / "signatures.py"), *gone).stdout)
    assert set(answer["members"].values()) == {None}
    real = json.loads(tensorrt_11.run(str(HERE / "signatures.py"), "Builder.create_network").stdout)["members"]
    (overload,) = real["Builder.create_network"]["signatures"]
    assert accepts(overload, inspect.signature(api.Builder.create_network))

    def other(self, options: int = 0) -> "api.INetworkDefinition": ...

    assert not accepts(overload, inspect.signature(other))


def test_flags_of_every_option_are_declared() -> None:
    options = TensorRtOptions(
        timing_cache=Path("c"),
        error_on_cache_miss=True,
        refit="all",
        strip_weights=True,
        weight_streaming=True,
        version_compatible=True,
        exclude_lean_runtime=True,
        distributive_independence=True,
        tf32=True,
    )
    used = {*options.flags, *TensorRtOptions(refit="identical").flags}
    assert used == set(ENUMERATIONS["BuilderFlag"])
    assert set(ENUMERATIONS) < set(TensorRt.__annotations__)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        __version__ = "10.9.0"

    monkeypatch.setattr("importlib.import_module", lambda name: Module)
    with pytest.raises(KilnError, match=r"found TensorRT 10\.9\.0; Kiln builds with 10\.13 to 11\.x"):
        tensorrt_module()
    Module.__version__ = "12.0.0"
    with pytest.raises(KilnError, match=r"12\.0\.0"):
        tensorrt_module()
    Module.__version__ = ".".join(map(str, OLDEST))
    assert tensorrt_module() is Module
    Module.__version__ = "1.7.1"
    assert tensorrt_module("tensorrt_rtx") is Module


def test_a_missing_module_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(KilnError, match="pip install tensorrt-rtx"):
        tensorrt_module("tensorrt_rtx")
