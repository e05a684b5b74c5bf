"""Where tasks run on a Ray cluster: on a node that has the machine type's label, in the same child process as here.

A task's files travel through the registry's store, in the chunks that releases are made of: what a gate reads is there
already, because it was published, and what a build makes is there when it is published. So bundles go once over the
network, straight between node and store, and the key that signs stays where the run is. A node's folder of a job is
kept, and only what differs is fetched. Knows nothing of what tasks do but the names of their files.
"""

import queue
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.nightly.executor import Limits, LocalExecutor, Outcome, Task, Told
from pipeline.nightly.fingerprint import Machine, code_digest
from pipeline.nightly.tasks import GIVES, NEEDS
from pipeline.ray_cluster import SLICE, label_of, nodes, nodes_of, ray_module
from pipeline.registry.access import Access
from pipeline.registry.records import StoredFile
from pipeline.registry.store import Store, absolute_url
from pipeline.registry.transfer import CHUNK_BYTES, download, stored_file, upload
from plugins.errors import KilnError, first_line

WHOLE = 0.9
"""Of a node's label, so that its tasks do not disturb each other; replicas that serve there take slices of the rest."""
FOLDER = "~/.cache/kiln/nightly"
"""Of each node; the home folder is that of whoever started Ray there."""
_LOOK_SECONDS = 5.0

Files = dict[str, StoredFile]


@dataclass(frozen=True)
class Work:
    """A task as its node gets it. `job` names the folder there, below `root`."""

    kind: str
    options: Mapping[str, Any]
    sku: str
    job: str
    limits: Limits
    files: Files
    url: str
    single_writer: bool
    root: str


@dataclass(frozen=True)
class Done:
    """What a node gives back."""

    outcome: Outcome
    files: Files


class RayExecutor:
    """Implements `Executor` for the registry at `url`, which every node must reach. The driver must be connected."""

    def __init__(self, url: str, single_writer: bool, skus: tuple[str, ...], owner: str, root: str = FOLDER) -> None:
        """`skus` are those of the run; `owner` is whose folders the nodes keep, below `root`."""
        self._url, self._single_writer, self._owner, self._root = absolute_url(url), single_writer, owner, root
        labels = {label_of(sku) for sku in skus}
        self.slots = max(1, sum(not labels.isdisjoint(node.resources) for node in nodes()))
        self._machines: dict[str, Machine] = {}
        self._lock = threading.Lock()

    def machine(self, sku: str) -> Machine:
        """The node of a machine type. Raises KilnError where there is none, or it has another Kiln than this one."""
        ray = ray_module()
        with self._lock:
            if sku not in self._machines:
                nodes_of(sku, nodes())
                asked = ray.remote(num_cpus=0, resources={label_of(sku): SLICE}, max_retries=3)(machine_here)
                try:
                    machine: Machine = ray.get(asked.remote())
                except ray.exceptions.RayError as error:
                    raise KilnError(
                        f"the node of {sku} cannot say what it is: {first_line(error)}; install Kiln there as here"
                    ) from error
                if machine.code != code_digest():
                    raise KilnError(
                        f"the node of {sku} has other sources of Kiln ({machine.code[:12]}) than this machine "
                        f"({code_digest()[:12]}); install the same version on all nodes"
                    )
                self._machines[sku] = machine
            return self._machines[sku]

    def run(self, task: Task, limits: Limits, told: Told) -> Outcome:
        start = time.monotonic()
        try:
            return self._run(task, limits, told)
        except ray_module().exceptions.RayError as error:
            message = f"its node or worker was lost: {first_line(error)}"
            return Outcome("crashed", None, message, time.monotonic() - start)
        except KilnError as error:
            return Outcome("crashed", None, str(error), time.monotonic() - start)

    def _run(self, task: Task, limits: Limits, told: Told) -> Outcome:
        ray = ray_module()
        task.folder.mkdir(parents=True, exist_ok=True)
        nodes_of(task.sku, nodes())
        store = Store(self._url, self._single_writer)
        with _lease(store):
            files = describe(task.folder, NEEDS[task.kind])
            upload(store, task.folder, files, CHUNK_BYTES)
            job = f"{self._owner}/{task.folder.name}"
            where = (self._url, self._single_writer, self._root)
            work = Work(task.kind, task.options, task.sku, job, limits, files, *where)
            run = ray.remote(num_cpus=0, resources={label_of(task.sku): WHOLE}, max_retries=0, num_returns="streaming")
            done = self._followed(run(run_on_node).remote(work), task, told)
            bring(store, task.folder, done.files, GIVES[task.kind])
        return done.outcome

    def _followed(self, messages: Any, task: Task, told: Told) -> Done:
        """Lines as they come, until the end. Raises RayError for a node that is lost, KilnError for the last one."""
        ray = ray_module()
        with (task.folder / f"{task.kind}.log").open("w") as log:
            while True:
                ready, _ = ray.wait([messages], timeout=_LOOK_SECONDS)
                if not ready:
                    try:
                        nodes_of(task.sku, nodes())
                    except KilnError:
                        ray.cancel(messages)
                        raise
                    continue
                message = ray.get(next(messages))
                if isinstance(message, Done):
                    return message
                for line in message:
                    log.write(f"{line}\n")
                    told(line)


def machine_here() -> Machine:
    """Runs as a Ray task."""
    return Machine()


def run_on_node(work: Work) -> Iterator[list[str] | Done]:
    """Runs as a Ray task: gives what the child prints as it comes, then what it did."""
    folder = Path(work.root).expanduser() / work.job
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(work.url, work.single_writer)
    bring(store, folder, work.files, (*NEEDS[work.kind], *GIVES[work.kind]))
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    outcomes: list[Outcome | BaseException] = []
    task = Task(work.kind, folder, work.sku, work.options)
    thread = threading.Thread(target=partial(_perform, task, work.limits, lines, outcomes))
    thread.start()
    while (line := lines.get()) is not None:
        yield [line]
    thread.join()
    outcome = outcomes[0]
    if isinstance(outcome, BaseException):
        raise outcome
    files = describe(folder, GIVES[work.kind]) if outcome.status == "done" else {}
    upload(store, folder, files, CHUNK_BYTES)
    yield Done(outcome, files)


def _perform(
    task: Task, limits: Limits, lines: "queue.SimpleQueue[str | None]", outcomes: list[Outcome | BaseException]
) -> None:
    try:
        outcomes.append(LocalExecutor().run(task, limits, lines.put))
    except BaseException as error:
        outcomes.append(error)
    finally:
        lines.put(None)


def describe(folder: Path, names: tuple[str, ...]) -> Files:
    """How what lies under these names in a folder is stored, files of folders one by one; what is not there is left."""
    paths = [path for name in names for path in _files(folder / name)]
    return {path.relative_to(folder).as_posix(): stored_file(path, CHUNK_BYTES) for path in paths}


def bring(store: Store, folder: Path, files: Files, names: tuple[str, ...]) -> None:
    """Have exactly these files under these names. Raises RegistryError for what the store lacks."""
    for name in names:
        for path in _files(folder / name):
            if path.relative_to(folder).as_posix() not in files:
                path.unlink()
        if (folder / name).is_dir() and not _files(folder / name):
            shutil.rmtree(folder / name)
    download(store, folder, files, CHUNK_BYTES)


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())


@contextmanager
def _lease(store: Store) -> Iterator[None]:
    """Keeps the registry's collector from taking chunks that no release names yet."""
    with Access(store, None, None, f"ray-{uuid.uuid4().hex}").lease():
        yield
