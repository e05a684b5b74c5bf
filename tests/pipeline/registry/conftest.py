"""A registry in a folder and one in memory, the keys for them, and what publishes into them."""

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from pipeline.registry import Registry, Release, SigningKey, Store, TrustedKeys
from pipeline.registry.keys import create_key, public_path, trusted_keys_from_file
from tests.pipeline.registry.registry_material import CHUNK, MACHINE, make_bundle


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[SigningKey, TrustedKeys]:
    path = tmp_path_factory.mktemp("keys") / "signer.pem"
    key = create_key(path)
    return key, trusted_keys_from_file(public_path(path))


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "registry") if request.param == "file" else f"memory://{uuid.uuid4().hex}"


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
