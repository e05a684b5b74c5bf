"""What tests on a real cluster share. They take minutes on two cores, so they are opt-in: pytest -m cluster."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.bundle import open_bundle
from pipeline.build import build
from pipeline.config import BuildConfig
from tests.pipeline.deploy.cluster_material import ray_cluster


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, serving_bundle: Path) -> Iterator[Any]:
    """Four node processes: a head, and three nodes of the bundle's machine type with one CPU each."""
    if "cluster" not in request.config.getoption("-m"):
        pytest.skip("opt-in: -m cluster")
    pytest.importorskip("ray")
    with ray_cluster(3, open_bundle(serving_bundle).manifest.sku.name) as made:
        yield made


@pytest.fixture(scope="session")
def serving_bundle(request: pytest.FixtureRequest) -> Path:
    """The tiny Llama, as build-engine makes it."""
    if "cluster" not in request.config.getoption("-m"):
        pytest.skip("opt-in: -m cluster")
    return request.getfixturevalue("llama_bundle")


@pytest.fixture(scope="session")
def other_bundle(serving_bundle: Path, make_llama: Any, silent: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with one matrix perturbed: another version with the same tokenizer."""
    path = tmp_path_factory.mktemp("bundles") / "other"
    build(str(make_llama(noise=0.05)), ["cpu"], BuildConfig(out=path), silent)
    return path
