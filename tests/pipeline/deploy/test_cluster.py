"""Replicas on a real Ray cluster of four node processes: endpoints, lost replicas, updates, scaling."""

import os
import signal

import httpx
import pytest
from click.testing import CliRunner

from pipeline.cli import kiln_group
from pipeline.deploy import application, update
from pipeline.deploy.bundles import FolderSource
from pipeline.deploy.figures import Limits
from pipeline.deploy.options import Version
from pipeline.deploy.rollout import Plan
from pipeline.deploy.steward import running_replicas
from plugins.errors import KilnError
from tests.pipeline.deploy.cluster_material import (
    NAME,
    Client,
    application_up,
    free_port,
    options,
    replica_processes,
    wait_until,
)

pytestmark = pytest.mark.cluster

PROMPTS = [f"The {what} of the" for what in ("name", "type", "value", "list", "file", "class", "module", "string")]


@pytest.fixture(scope="module")
def source(cluster, serving_bundle) -> FolderSource:
    return FolderSource.open(serving_bundle)


@pytest.fixture(scope="module")
def port() -> int:
    """Serve's proxies keep theirs."""
    return free_port()


@pytest.fixture
def client(source, port):
    with application_up(options("kiln", source), source, port) as made:
        yield made


def version_up() -> str:
    """The one version in service."""
    (app,) = application.require("kiln").replicas
    return app


def test_the_servers_endpoints_answer_over_the_cluster(client):
    with httpx.Client(base_url=client.url, timeout=120) as http:
        assert http.get("/v1/models").json()["data"][0]["id"] == NAME
        whole = http.post("/v1/completions", json=client.body(PROMPTS[0], 12, False)).json()
        assert whole["usage"]["completion_tokens"] == 12
        two = http.post("/v1/completions", json={**client.body(PROMPTS[0], 4, False), "n": 2}).json()
        assert len(two["choices"]) == 2
        long = http.post("/v1/completions", json=client.body("a " * 3000, 4, False))
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert http.post("/v1/completions", json={"model": "other", "prompt": "a"}).status_code == 404
        streamed = client.start(PROMPTS[0], 12, stream=True)
        client.join()
        assert (streamed.text, streamed.done, streamed.error) == (whole["choices"][0]["text"], True, None)
        metrics = http.get("/metrics").text
    replicas = {line for line in metrics.splitlines() if line.startswith("kiln_engine_up{")}
    assert len(replicas) == 2, metrics
    status = CliRunner().invoke(kiln_group, ["deploy", "ray", "status"], catch_exceptions=False)
    assert "2 running" in status.output


def test_a_killed_replica_loses_no_request_that_can_be_sent_again(client):
    """Whole answers all come; streams that had begun say that they failed; the replica comes back."""
    expected = {prompt: client.ask(prompt, 150).text for prompt in PROMPTS}
    load = Client(client.url)
    asked = [(prompt, stream, load.start(prompt, 150, stream)) for prompt in PROMPTS for stream in (False, True)]
    wait_until(lambda: sum(bool(answer.text) for _, stream, answer in asked if stream) >= 4, "streams that run")
    app = version_up()
    before = replica_processes(app)
    os.kill(min(before), signal.SIGKILL)
    load.join()
    failed = [answer for _, _, answer in asked if answer.error is not None]
    for prompt, stream, answer in asked:
        assert answer.status == 200
        if answer.error is None:
            assert answer.done
            assert answer.text == expected[prompt]
        else:
            assert stream, "an answer that nobody had seen a part of was lost"
            assert answer.error == "engine_died"
            assert expected[prompt].startswith(answer.text)
    assert failed, "the replica had no stream that had begun, so this shows nothing"
    wait_until(lambda: len(replica_processes(app)) == 2 and running_replicas(app) == 2, "the replica's return")
    assert replica_processes(app).keys() != before.keys()


def test_a_killed_engine_process_is_mended_by_its_replica(client):
    """The replica stays, only its engine is opened again; meanwhile requests go to the other one."""
    app = version_up()
    before = replica_processes(app)
    engine = next(iter(before.values())).children()[0]
    engine.kill()
    assert [client.ask(prompt).done for prompt in PROMPTS] == [True] * len(PROMPTS)
    assert replica_processes(app).keys() == before.keys()


def test_a_good_version_takes_over_and_a_broken_one_goes_back(client, source, other_bundle, silent):
    new = Version.of("kiln", FolderSource.open(other_bundle))
    old = version_up()
    limits = Limits(requests=4, latency=20.0, patience=300.0)
    update.start(application.require("kiln"), new, (0.5, 1.0), 1, limits)
    with pytest.raises(KilnError, match="is under way"):
        application.begin("kiln", Plan(old, "another", 2))
    report = until_ended(client)
    assert report.phase == "done", report.text
    update.finish(application.require("kiln").options, report, new, None, silent)
    state = application.require("kiln")
    assert set(state.replicas) == {new.app}
    assert [side.app for side in state.traffic.sides] == [new.app]
    back = Version.of("kiln", source)
    application.prepare(state.options, back, Plan(new.app, back.app, 2, (0.5, 1.0), 1, limits))
    application.begin("kiln", Plan(new.app, back.app, 2, (0.5, 1.0), 1, limits))
    wait_until(lambda: len(application.require("kiln").traffic.sides) == 2, "a share for the new version")
    killed: set[int] = set()

    def kill_and_ask() -> bool:
        for number, process in replica_processes(back.app).items():
            process.kill()
            killed.add(number)
        assert client.ask(PROMPTS[0]).done, "what the broken version failed is answered by the other one"
        return application.report("kiln").phase == "back"

    wait_until(kill_and_ask, "the way back")
    assert killed
    assert application.report("kiln").traffic.sides[0].app == new.app
    update.finish(state.options, application.report("kiln"), back, None, silent)
    assert set(application.require("kiln").replicas) == {new.app}


def test_load_brings_more_replicas(source, port):
    with application_up(options("kiln", source, replicas=1, most=2), source, port) as client:
        app = version_up()
        assert running_replicas(app) == 1

        def keep_busy() -> bool:
            while sum(not answer.done for answer in client.answers) < 12:
                client.start(PROMPTS[0], 300, stream=False)
            return running_replicas(app) == 2

        wait_until(keep_busy, "a second replica")
        client.join()
        assert all(answer.done for answer in client.answers)


def test_what_cannot_be_opened_says_why_and_leaves_nothing(source, port):
    application.start_serve("127.0.0.1", port)
    wrong = options("kiln", source, replicas=1)
    with pytest.raises(KilnError, match="did not come up"):
        application.up(wrong, FolderSource(source.path, "0" * 64))
    assert application.find("kiln") is None
    assert application.down("kiln") == []


def until_ended(client):
    def look():
        client.ask(PROMPTS[0])
        report = application.report("kiln")
        return report if report.phase in ("done", "back") else None

    return wait_until(look, "the update's end")
