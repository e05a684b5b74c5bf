"""Replicas on a real Ray cluster of four node processes: endpoints, lost replicas, updates, scaling."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

import httpx
import psutil
import pytest
from click.testing import CliRunner

from pipeline.cli import kiln_group
from pipeline.cli_deploy import WENT_BACK
from pipeline.deploy import application, update
from pipeline.deploy.bundles import FolderSource
from pipeline.deploy.figures import Limits
from pipeline.deploy.options import Version
from pipeline.deploy.rollout import Plan
from pipeline.deploy.standing import Standing, standing_of
from pipeline.registry.keys import create_key, public_path, signing_key_from_pem, trusted_keys_from_file
from pipeline.registry.registry import Registry
from pipeline.registry.store import Store
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

NEVER_PASSES = Limits(requests=1_000_000, latency=1.0, patience=300.0)
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
    """Whole answers all come; streams that had begun say that they failed; the replica comes back.

    Engines are slowed and then stopped until the kill, or all would be over by then; streams come first, so that each
    replica has some.
    """
    expected = {prompt: client.ask(prompt, 400).text for prompt in PROMPTS}
    app = version_up()
    before = replica_processes(app)
    engines = [engine for replica in before.values() for engine in replica.children()]
    load = Client(client.url)
    with slowed(*engines, share=0.01):
        asked = [(prompt, True, load.start(prompt, 400, stream=True)) for prompt in PROMPTS]
        wait_until(lambda: sum(bool(answer.text) for *_, answer in asked) >= 6, "streams that run")
    with stopped(*engines):
        asked += [(prompt, False, load.start(prompt, 400, stream=False)) for prompt in PROMPTS]
        threading.Event().wait(2)  # for them to arrive
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
    wait_until(lambda: len(replica_processes(app)) == 2 and running(app) == 2, "the replica's return")
    assert replica_processes(app).keys() != before.keys()


def test_a_killed_engine_process_is_mended_by_its_replica(client):
    """The replica stays, only its engine is opened again; meanwhile requests go to the other one."""
    app = version_up()
    before = replica_processes(app)
    engine = next(iter(before.values())).children()[0]
    engine.kill()
    assert [client.ask(prompt).done for prompt in PROMPTS] == [True] * len(PROMPTS)
    assert replica_processes(app).keys() == before.keys()


def test_a_good_version_takes_over(client, other_bundle, silent):
    new = Version.of("kiln", FolderSource.open(other_bundle))
    old = version_up()
    limits = Limits(requests=4, latency=20.0, patience=300.0)
    update.start(application.require("kiln"), new, (0.5, 1.0), 1, limits)
    with pytest.raises(KilnError, match="is under way"):
        application.begin(application.require("kiln").options, new, Plan(old, "another", 2))
    report = until_ended(client)
    assert report.phase == "done", report.text
    update.finish(application.require("kiln").options, report, new, None, silent)
    state = application.require("kiln")
    assert set(state.replicas) == {new.app}
    assert [side.app for side in state.traffic.sides] == [new.app]


@pytest.mark.parametrize(("lost", "reason"), [("engine", "requests failed"), ("replica", "replicas runs any more")])
def test_a_broken_version_goes_back_and_its_requests_are_answered(client, other_bundle, silent, lost, reason):
    state, new = application.require("kiln"), Version.of("kiln", FolderSource.open(other_bundle))
    update.start(state, new, (0.5, 1.0), 1, NEVER_PASSES)
    wait_until(lambda: len(application.report("kiln").traffic.sides) == 2, "a share for the new version")

    def kill_and_ask() -> bool:
        for replica in replica_processes(new.app).values():
            for process in replica.children() if lost == "engine" else [replica]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        assert client.ask(PROMPTS[0]).done, "what the broken version failed is answered by the other one"
        return application.report("kiln").phase == "back"

    wait_until(kill_and_ask, "the way back")
    report = application.report("kiln")
    assert reason in report.text
    assert [side.app for side in report.traffic.sides] == list(state.replicas)
    update.finish(state.options, report, new, None, silent)
    assert application.require("kiln").replicas.keys() == state.replicas.keys()


def test_a_slow_version_goes_back(client, other_bundle, silent):
    """Its engine is stopped for most of the time, so that its answers are right but late."""
    state, new = application.require("kiln"), Version.of("kiln", FolderSource.open(other_bundle))
    update.start(state, new, (0.5, 1.0), 1, NEVER_PASSES)
    wait_until(lambda: standing_of(new.app) == Standing("RUNNING", 1), "a replica of the new version")
    (replica,) = replica_processes(new.app).values()
    (engine,) = replica.children()
    with slowed(engine):
        report = until_ended(client)
    assert report.phase == "back", report.text
    assert "quantile of latency is above" in report.text
    update.finish(state.options, report, new, None, silent)
    assert set(application.require("kiln").replicas) == set(state.replicas)


def test_what_an_ended_update_left_gives_way_to_the_next_one(client, source, other_bundle, silent):
    """Nobody has tidied up after the first one, whose new version cannot be opened."""
    state = application.require("kiln")
    broken = Version.of("kiln", FolderSource(source.path, "0" * 64))
    update.start(state, broken, (1.0,), 1, NEVER_PASSES)
    report = until_ended(client)
    assert "did not come up" in report.text
    assert "was rebuilt" in report.text
    assert broken.app in application.require("kiln").replicas
    new = Version.of("kiln", FolderSource.open(other_bundle))
    update.start(application.require("kiln"), new, (1.0,), 1, Limits(requests=2, latency=20.0, patience=300.0))
    assert broken.app not in application.require("kiln").replicas
    assert until_ended(client).phase == "done"


def test_the_command_updates_a_full_cluster_from_a_registry(source, port, other_bundle, tmp_path):
    """Three nodes, three replicas, no room for a fourth: the old version gives way first."""
    create_key(tmp_path / "k.pem")
    trusted = trusted_keys_from_file(public_path(tmp_path / "k.pem"))
    registry = Registry(Store(str(tmp_path / "registry")), trusted, signing_key_from_pem(tmp_path / "k.pem"))
    sku = source.manifest().sku.name
    for path in (source.path, other_bundle):
        release = registry.publish(path, model=NAME)
        registry.attest(release, True, {}, {})
        registry.promote(NAME, sku, "canary", release.version)
        if release.version == 1:
            registry.promote(NAME, sku, "stable", 1)
    common = (NAME, "--registry", tmp_path / "registry", "--trust", public_path(tmp_path / "k.pem"), "--sku", sku)
    common = (*common, "--cache", tmp_path / "node")
    rolling = ("roll", *common, "--surge", 0, "--latency", 20, "--requests", 2, "--steps", "0.5,1")
    try:
        address = command("up", *common, "--name", NAME, "--port", port, "--max-running", 4).strip()
        assert address == f"http://127.0.0.1:{port}"
        client = Client(address)
        assert client.ask(PROMPTS[0]).done
        (old,) = json.loads(command("status", "--json"))["versions"]
        with asking(client):
            assert "passed at 100% of the traffic" in command(*rolling, "--key", tmp_path / "k.pem")
        assert registry.head(NAME, sku, "stable").version == 2
        (new,) = json.loads(command("status", "--json"))["versions"]
        assert new != old
        wait_until(lambda: fingerprint(client) == new, "the new version's fingerprint")
        assert "serves already" in command(*rolling)
        again = Version.of("kiln", source)
        assert again.app == old
        update.start(application.require("kiln"), again, (0.5, 1.0), 0, NEVER_PASSES)
        assert command("abort").strip() == "the update went back"
        back = ("roll", source.path)
        assert "somebody ended it" in command(*back, code=WENT_BACK)
        assert set(json.loads(command("status", "--json"))["versions"]) == {new}
    finally:
        command("down")
    assert command("down").strip() == "nothing of kiln runs"


def test_a_queue_brings_more_replicas_and_rest_takes_them_away(source, port):
    with application_up(options("kiln", source, replicas=1, most=2), source, port) as client:
        app = version_up()
        with asking(client, 12, 300):
            wait_until(lambda: running(app) == 2, "a second replica")
        wait_until(lambda: running(app) == 1, "its end")


def test_requests_that_wait_for_blocks_bring_more_replicas(source, port):
    """Three requests are few for four places, but want 13 of 30 blocks each; slowed, or they would be over at once."""
    deployed = options("kiln", source, replicas=1, most=2)
    deployed = replace(deployed, engine=replace(deployed.engine, kv_blocks=30))
    with application_up(deployed, source, port) as client:
        app = version_up()
        (replica,) = replica_processes(app).values()
        (engine,) = replica.children()
        with slowed(engine), asking(client, 3, 24, prompt_tokens=208):
            wait_until(lambda: running(app) == 2, "a second replica")
        wait_until(lambda: running(app) == 1, "its end")


def test_what_cannot_be_opened_says_why_and_leaves_nothing(source, port):
    wrong = options("kiln", source, replicas=1)
    with pytest.raises(KilnError, match=r"did not come up: .*it was rebuilt"):
        application.up(wrong, FolderSource(source.path, "0" * 64), "127.0.0.1", port)
    assert application.find("kiln") is None
    assert application.down("kiln") == []


def test_replicas_that_have_no_room_are_given_up(source, port):
    greedy = replace(options("kiln", source), actor={"num_cpus": 2})
    with pytest.raises(KilnError, match="did not come up within 1 s: 0 run"):
        application.up(greedy, source, "127.0.0.1", port, patience=1.0)
    assert application.find("kiln") is None


def running(app: str) -> int:
    return (standing_of(app) or Standing()).running


def fingerprint(client: Client) -> str:
    answer = httpx.post(f"{client.url}/v1/completions", json=client.body(PROMPTS[0], 1, False), timeout=60)
    return answer.json()["system_fingerprint"]


def command(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(kiln_group, ["deploy", "ray", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


@contextmanager
def asking(client: Client, at_once: int = 1, tokens: int = 8, prompt_tokens: int = 16) -> Iterator[None]:
    """So many requests at any time, each of which must be answered."""
    over = threading.Event()

    def ask(number: int) -> None:
        while not over.is_set():
            answer = client.ask([10 + number] * prompt_tokens, tokens)
            assert answer.done, answer.error

    with ThreadPoolExecutor(at_once) as pool:
        asked = [pool.submit(ask, number) for number in range(at_once)]
        try:
            yield
        finally:
            over.set()
    for each in asked:
        each.result()


@contextmanager
def stopped(*processes: psutil.Process) -> Iterator[None]:
    """They stand still; those that end meanwhile are left alone."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


@contextmanager
def slowed(*processes: psutil.Process, share: float = 0.05) -> Iterator[None]:
    """They run for a share of the time."""
    over = threading.Event()

    def stop_and_go() -> None:
        while not over.is_set():
            with stopped(*processes):
                over.wait(1 - share)
            over.wait(share)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def until_ended(client):
    def look():
        client.ask(PROMPTS[0])
        report = application.report("kiln")
        return report if report.phase in ("done", "back") else None

    return wait_until(look, "the update's end")
