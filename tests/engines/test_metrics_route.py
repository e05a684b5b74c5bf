"""/metrics: families of several engines in one text that Prometheus' own parsers read, and the HTTP side's."""

import asyncio
import hashlib

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as prometheus
from starlette.testclient import TestClient

from engines.runtime.info import EngineInfo
from engines.runtime.metrics import EngineMetrics
from engines.server.app import create_app
from engines.server.auth import Caller, KeyRing
from engines.server.config import ServerConfig
from engines.server.metrics_route import merged
from engines.server.served import LocalEngine


class Counting:
    """An engine that only has figures; `answer` is what it says when it is asked for them."""

    def __init__(self, name, tokens=0):
        self.info = EngineInfo(name, "decoder")
        self.figures = EngineMetrics(name)
        self.figures.generated_tokens.inc(tokens)
        self.figures.first_token_seconds.observe(0.2)
        self.figures.finished("stop")
        self.ready = True
        self.answer = self._families

    async def _families(self):
        return self.figures.families()

    async def metrics(self):
        return await self.answer()


@pytest.fixture
def engines():
    return {"a": Counting("a", 3), "b": Counting("b", 40)}


@pytest.fixture
def client(engines):
    with TestClient(create_app(engines), raise_server_exceptions=False) as client:
        yield client


def samples(client, parse=prometheus, **headers):
    """Values by sample name and labels."""
    text = client.get("/metrics", headers=headers).text
    return {
        (s.name, *(f"{k}={v}" for k, v in sorted(s.labels.items()))): s.value
        for family in parse(text)
        for s in family.samples
    }


def test_a_family_of_several_engines_appears_once_with_the_samples_of_all(client):
    text = client.get("/metrics").text
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    assert "_created" not in text
    found = samples(client)
    assert found["kiln_generated_tokens_total", "model=a"] == 3
    assert found["kiln_generated_tokens_total", "model=b"] == 40
    assert found["kiln_first_token_seconds_bucket", "le=0.25", "model=a"] == 1
    assert found["kiln_requests_total", "model=b", "outcome=stop"] == 1
    assert found[("process_resident_memory_bytes",)] > 1e6


def test_open_metrics_for_those_who_ask(client):
    accept = "application/openmetrics-text; version=1.0.0"
    answer = client.get("/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.text.endswith("# EOF\n")
    assert samples(client, open_metrics, Accept=accept)["kiln_generated_tokens_total", "model=b"] == 40
    plain = client.get("/metrics").headers["content-type"]
    assert plain.startswith("text/plain; version=")


def test_requests_are_counted_by_template_and_status(client):
    for path in ("/v2/models/a", "/v2/models/b", "/v2/models/none", "/v1/models", "/no/such/path", "/no/other"):
        client.get(path)
    client.post("/v1/models")
    client.post("/v1/embeddings", json={})
    found = samples(client)
    count = {key[1:]: value for key, value in found.items() if key[0] == "kiln_http_requests_total"}
    assert count["route=/v2/models/{name}", "status=200"] == 2
    assert count["route=/v2/models/{name}", "status=404"] == 1
    assert count["route=/v1/models", "status=200"] == 1
    assert count["route=/v1/embeddings", "status=400"] == 1
    assert count["route=none", "status=404"] == 2
    assert not any("/no/" in label for labels in count for label in labels)
    assert found["kiln_http_request_seconds_count", "route=/v2/models/{name}"] == 3
    assert found[("kiln_http_in_flight",)] == 1  # that which asks
    assert samples(client)["kiln_http_requests_total", "route=/metrics", "status=200"] == 1


def test_requests_in_flight_and_those_that_fail_are_counted(client, engines):
    async def broken():
        raise ValueError("a bug")

    engines["a"].answer = broken
    assert client.get("/metrics").status_code == 500
    engines["a"].answer = engines["a"]._families
    found = samples(client)
    assert found["kiln_http_requests_total", "route=/metrics", "status=500"] == 1
    assert found[("kiln_http_in_flight",)] == 1


def test_an_engine_that_is_away_hides_nobody_elses_figures(client, engines):
    async def nothing():
        return []

    engines["a"].answer = nothing
    found = samples(client)
    assert ("kiln_generated_tokens_total", "model=a") not in found
    assert found["kiln_generated_tokens_total", "model=b"] == 40


def test_merging_changes_no_engines_own_families():
    first, second = EngineMetrics("a").families(), EngineMetrics("b").families()
    counts = [len(family.samples) for family in first]
    twice = merged([first, second])
    assert [len(family.samples) for family in first] == counts
    assert [family.name for family in twice] == [family.name for family in first]
    assert merged([]) == []


@pytest.mark.parametrize("path", ["/metrics", "/status.json"])
def test_figures_need_a_key_unless_they_are_open(engines, path):
    keys = KeyRing({hashlib.sha256(b"secret-key").digest(): Caller("team")})
    with TestClient(create_app(engines, keys=keys)) as client:
        assert client.get(path).status_code == 401
        assert client.get(path, headers={"Authorization": "Bearer other-key"}).status_code == 401
        assert client.get(path, headers={"Authorization": "Bearer secret-key"}).status_code == 200
        counted = samples(client, Authorization="Bearer secret-key")
        assert counted["kiln_http_requests_total", "route=none", "status=401"] == 2
    with TestClient(create_app(engines, ServerConfig(open_metrics=True), keys)) as client:
        assert client.get(path).status_code == 200


def test_a_real_engine_under_load(fake_engine):
    engine = fake_engine()

    async def main():
        app = create_app({"model": LocalEngine(engine)})
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://kiln") as client:
            body = {"model": "model", "prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True}
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(5)))
            assert [answer.status_code for answer in answers] == [200] * 5
            return (await client.get("/metrics")).text

    found = {(s.name, s.labels.get("outcome")): s.value for f in prometheus(asyncio.run(main())) for s in f.samples}
    assert found["kiln_generated_tokens_total", None] == 30
    assert found["kiln_prompt_tokens_total", None] == 15
    assert found["kiln_first_token_seconds_count", None] == 5
    assert found["kiln_inter_token_seconds_count", None] == 25
    assert found["kiln_requests_total", "length"] == 5
