"""API keys: the file, and what each key may do."""

import hashlib
import hmac
import json

import httpx
import pytest

from engines.server.auth import Caller, KeyRing
from engines.server.config import ServerConfig
from plugins.errors import KilnError

TOML = f"""
[[keys]]
name = "team-a"
key = "sk-first-secret"

[[keys]]
name = "nightly"
sha256 = "{hashlib.sha256(b"sk-second-secret").hexdigest()}"
tenant = "shared"
highest_lane = "batch"
max_concurrent = 2
"""


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(TOML)
    return KeyRing.read(file)


def test_who_holds_a_key(keys):
    assert keys.caller("sk-first-secret") == Caller("team-a", "team-a", "interactive", "interactive", None)
    assert keys.caller("sk-second-secret") == Caller("nightly", "shared", "batch", "batch", 2)
    for unknown in ("", "sk-first-secre", "sk-first-secrets", "SK-FIRST-SECRET", "\xff", "\udcff"):
        assert keys.caller(unknown) is None


def test_a_json_file_says_the_same(keys, tmp_path):
    import tomllib

    file = tmp_path / "keys.json"
    file.write_text(json.dumps(tomllib.loads(TOML)))
    assert KeyRing.read(file).caller("sk-second-secret") == keys.caller("sk-second-secret")


def test_every_key_is_compared_in_constant_time_whichever_matches(keys, monkeypatch):
    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    for presented in ("sk-first-secret", "sk-second-secret", "other"):
        compared.clear()
        keys.caller(presented)
        assert len(compared) == 2
        assert all(len(a) == len(b) == 32 for a, b in compared)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "keys: Field required"),
        ("keys = []", "keys: List should have at least 1 item"),
        ("[[keys]]\nname = 'a'\n", "expected either key or sha256"),
        ("[[keys]]\nname = 'a'\nkey = 'sk-secret-1'\nlanes = 'x'\n", "keys.0.lanes: Extra inputs"),
        ("[[keys]]\nname = 'a b'\nkey = 'sk-secret-1'\n", "keys.0.name: String should match"),
        ("[[keys]]\nname = 'a'\nkey = 'secret'\n", "keys.0.key: String should have at least 8"),
        ("[[keys]]\nname = 'a'\nsha256 = 'secret'\n", "keys.0.sha256: String should match"),
        ("[[keys]]\nname = 'a'\nkey = 'sk-secret-1'\nlane = 'fast'\n", "keys.0.lane: Input should be 'interactive' or"),
        (
            "[[keys]]\nname = 'a'\nkey = 'sk-secret-1'\nlane = 'interactive'\nhighest_lane = 'batch'\n",
            "lane is interactive but highest_lane batch",
        ),
        ("[[keys]]\nname = 'a'\nkey = 'sk-secret-1'\n" * 2, "two keys have the same name"),
        (
            "[[keys]]\nname = 'a'\nkey = 'sk-secret-1'\n[[keys]]\nname = 'b'\nkey = 'sk-secret-1'\n",
            "two keys have the same key",
        ),
        ("[[keys", "expected a TOML or .json file"),
        ("\xff", "expected a TOML or .json file"),
    ],
)
def test_a_wrong_file_is_refused_without_quoting_a_key(tmp_path, text, message):
    file = tmp_path / "keys.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(KilnError, match=message.replace(".", r"\.")) as caught:
        KeyRing.read(file)
    assert "secret" not in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(KilnError, match="No such file"):
        KeyRing.read(tmp_path / "none.toml")


@pytest.fixture
def http(fake_engine, recorded_engine, served, keys):
    engine = recorded_engine(fake_engine())
    server = served({"fake": engine}, keys=keys)
    with httpx.Client(base_url=server.url) as client:
        client.engine, client.lines = engine, server.lines
        yield client


ASK = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 2}


def test_without_a_known_key_there_is_no_answer(http):
    for headers, code in (
        ({}, "missing_api_key"),
        ({"Authorization": "sk-first-secret"}, "missing_api_key"),
        ({"Authorization": "Basic sk-first-secret"}, "missing_api_key"),
        ({"Authorization": "Bearer"}, "missing_api_key"),
        (bearer("sk-other-secret"), "invalid_api_key"),
        ({"Authorization": b"Bearer \xff\xfe"}, "invalid_api_key"),
    ):
        for answer in (
            http.get("/v1/models", headers=headers),
            http.post("/v1/completions", json=ASK, headers=headers),
            http.get("/metrics", headers=headers),
            http.get("/v1/nothing", headers=headers),
        ):
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == code
    assert http.post("/v2/models/x/infer", json={}).json() == {
        "error": "no API key; send the header Authorization: Bearer KEY"
    }
    assert http.engine.submitted.empty()


def test_health_and_the_page_need_no_key(http):
    for path in ("/health", "/health/live", "/health/ready", "/v2/health/ready", "/"):
        assert http.get(path).status_code == 200


def test_metrics_may_be_open(fake_engine, recorded_engine, served, keys):
    server = served({"fake": recorded_engine(fake_engine())}, ServerConfig(open_metrics=True), keys)
    assert httpx.get(f"{server.url}/metrics").status_code == 200
    assert httpx.get(f"{server.url}/v1/models").status_code == 401


def test_a_key_gives_tenant_and_lane(http):
    for key, tenant, lane in (
        ("sk-first-secret", "team-a", "interactive"),
        ("sk-second-secret", "shared", "batch"),
    ):
        assert http.post("/v1/completions", json=ASK, headers=bearer(key)).status_code == 200
        request, _ = http.engine.submitted.get_nowait()
        assert (request.tenant, request.lane) == (tenant, lane)
    answer = http.post("/v1/completions", json={**ASK, "lane": "interactive"}, headers=bearer("sk-second-secret"))
    assert answer.status_code == 403
    assert answer.json()["error"] == {
        "message": "the key nightly may not use the lane interactive; use batch",
        "type": "permission_error",
        "param": "lane",
        "code": None,
    }
    assert http.post("/v1/completions", json={**ASK, "lane": "batch"}, headers=bearer("sk-first-secret")).is_success


def test_the_log_names_the_key_and_never_shows_it(http):
    http.post("/v1/completions?key=sk-first-secret", json=ASK, headers=bearer("sk-first-secret"))
    http.get("/v1/models", headers=bearer("sk-other-secret"))
    lines = [http.lines.get(timeout=20) for _ in range(2)]  # written when a request ends, after its answer is sent
    asked, refused = sorted(lines, key=lambda line: line.startswith("GET"))
    assert "POST /v1/completions 200 " in asked
    assert "model=fake prompt=3 generated=2 outcome=length key=team-a id=" in asked
    assert "GET /v1/models 401 " in refused
    assert "key=- " in refused
    assert not any("secret" in line for line in lines)


def test_a_key_has_its_own_number_of_requests_at_a_time(http):
    http.engine.engine.backend.gate.clear()
    headers = bearer("sk-second-secret")
    with http.stream("POST", "/v1/completions", json={**ASK, "stream": True}, headers=headers) as first:
        assert first.status_code == 200
        with http.stream("POST", "/v1/completions", json={**ASK, "stream": True}, headers=headers):
            third = http.post("/v1/completions", json=ASK, headers=headers)
            assert third.status_code == 429
            assert third.headers["retry-after"] == "1"
            assert third.json()["error"]["message"].startswith("the key nightly has 2 requests running, its limit")
            http.engine.engine.backend.gate.set()
            assert http.post("/v1/completions", json=ASK, headers=bearer("sk-first-secret")).is_success
