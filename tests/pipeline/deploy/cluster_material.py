"""A real Ray cluster of several node processes on this machine, and applications on it."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from engines.server.options import EngineOptions
from pipeline.deploy import application
from pipeline.deploy.bundles import BundleSource
from pipeline.deploy.options import Contract, DeployOptions, HttpOptions, ReplicaCount
from pipeline.deploy.scaling import ScalingTargets

NAME = "tiny"
_MEMORY = 100 << 20
_PATIENCE = 300.0


@contextlib.contextmanager
def ray_cluster(nodes: int, sku: str) -> Iterator[Any]:
    """A head without CPUs and nodes of one CPU each, with the label of a machine type; connected."""
    import ray
    from ray.cluster_utils import Cluster

    common = {"include_dashboard": False, "object_store_memory": _MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **common})
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=1, resources={f"sku:{sku}": 1}, object_store_memory=_MEMORY)
        ray.init(address=cluster.address, namespace="kiln", log_to_driver=False, logging_level="error")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def options(app: str, source: BundleSource, replicas: int = 2, most: int | None = None) -> DeployOptions:
    """A deployment of small engines."""
    return DeployOptions(
        app,
        Contract.of(source.manifest()),
        EngineOptions(max_running=4, threads=1),
        ReplicaCount(replicas, most or replicas, ScalingTargets(), up_delay=0.0, down_delay=2.0),
        {"num_cpus": 1},
        HttpOptions(NAME),
        places=4,
        drain=10.0,
    )


def wait_until(condition, what: str, seconds: float = _PATIENCE) -> Any:
    """The condition's first true value. Looks, because other processes tell nobody when they are ready."""
    end, waiting = time.monotonic() + seconds, threading.Event()
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} did not come about"
        waiting.wait(0.2)
    return found


def replica_processes(app: str) -> dict[int, psutil.Process]:
    """Processes of a version's engine replicas, by process id."""
    title = f"ray::ServeReplica:{app}:engine"
    found = {}
    for process in psutil.process_iter(["pid", "cmdline"]):
        if (process.info["cmdline"] or [""])[0].startswith(title):
            found[process.info["pid"]] = process
    return found


@dataclass
class Answer:
    """What a client saw."""

    status: int = 0
    text: str = ""
    error: str | None = None
    done: bool = False


@dataclass
class Client:
    """Requests on threads."""

    url: str
    answers: list[Answer] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, prompt: str, tokens: int, stream: bool) -> Answer:
        answer = Answer()
        self.answers.append(answer)
        work = self._stream if stream else self._whole
        self._threads.append(threading.Thread(target=work, args=(answer, self.body(prompt, tokens, stream))))
        self._threads[-1].start()
        return answer

    def join(self) -> None:
        for thread in self._threads:
            thread.join(_PATIENCE)
            assert not thread.is_alive()

    def ask(self, prompt: str | list[int], tokens: int = 8) -> Answer:
        answer = Answer()
        self._whole(answer, self.body(prompt, tokens, False))
        return answer

    @staticmethod
    def body(prompt: str | list[int], tokens: int, stream: bool) -> dict[str, Any]:
        return {
            "model": NAME,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }

    def _whole(self, answer: Answer, body: dict[str, Any]) -> None:
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=_PATIENCE)
        answer.status, document = response.status_code, response.json()
        if answer.status == 200:
            answer.text, answer.done = document["choices"][0]["text"], True
        else:
            answer.error = document["error"]["code"]

    def _stream(self, answer: Answer, body: dict[str, Any]) -> None:
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=_PATIENCE) as response:
            answer.status = response.status_code
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                document = json.loads(line.removeprefix("data: "))
                if "error" in document:
                    answer.error = document["error"]["code"]
                else:
                    answer.text += document["choices"][0]["text"]
                    answer.done |= document["choices"][0]["finish_reason"] is not None


@contextlib.contextmanager
def application_up(deployed: DeployOptions, source: BundleSource, port: int) -> Iterator[Client]:
    url = application.up(deployed, source, "127.0.0.1", port)
    try:
        yield Client(url)
    finally:
        application.down(deployed.app)
