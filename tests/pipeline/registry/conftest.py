"""A registry in a folder, one in memory, and with -m stores in object stores; keys, and what publishes into them."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from pipeline.registry import Registry, Release, SigningKey, Store, TrustedKeys
from pipeline.registry.keys import create_key, public_path, trusted_keys_from_file
from tests.pipeline.registry.registry_material import CHUNK, MACHINE, make_bundle
from tests.pipeline.registry.store_servers import BUCKET, SERVERS, Servers


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[SigningKey, TrustedKeys]:
    path = tmp_path_factory.mktemp("keys") / "signer.pem"
    key = create_key(path)
    return key, trusted_keys_from_file(public_path(path))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`url`: where a registry can be; `shared_url`: where several processes can write into it."""
    opted = "stores" in metafunc.config.getoption("-m")
    stores = [pytest.param(protocol, marks=pytest.mark.stores) for protocol in SERVERS] if opted else []
    for name, plain in (("url", ["file", "memory"]), ("shared_url", ["file"])):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, [*plain, *stores], indirect=True)


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack)


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return str(tmp_path / "registry")
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    request.getfixturevalue("servers").get(request.param)
    return f"{request.param}://{BUCKET}/{uuid.uuid4().hex}"


shared_url = url


@pytest.fixture
def registry(url: str, keys: tuple[SigningKey, TrustedKeys]) -> Registry:
    return Registry(Store(url), keys[1], keys[0], chunk_bytes=CHUNK)


@pytest.fixture
def publish(registry: Registry, tmp_path: Path) -> Callable[..., Release]:
    def make(mark: bytes = b"a", passed: bool | None = True, **options) -> Release:
        bundle = make_bundle(tmp_path / "made" / mark.hex(), mark)
        release = registry.publish(bundle.path, **options)
        if passed is not None:
            registry.attest(release, passed, MACHINE, {"accuracy": "the same"})
        return release

    return make
