"""Where tasks run: each in a process of its own, with limits of time and memory.

The seam for clusters (`ray_executor`): `Executor` is all that a run asks of one. A task is data; all files of Kiln's
making that it reads or writes lie in its folder, under relative names, so that an executor may carry the folder to
another machine and back. What else a task names (the model's source, samples, limits) must mean the same there.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Status = Literal["done", "refused", "crashed", "memory", "timeout"]
Told = Callable[[str], None]
"""Is told each line that a task prints."""
REFUSED, OUT_OF_MEMORY = 2, 77
"""Exit codes of the child: a KilnError, and memory that was not to be had."""


@dataclass(frozen=True)
class Task:
    """`kind` is a key of `pipeline.nightly.tasks.TASKS`; `options` are what JSON holds. `sku` is for who places it."""

    kind: str
    folder: Path
    sku: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """Seconds, and bytes of data memory (None: no limit)."""

    seconds: float
    memory: int | None


@dataclass(frozen=True)
class Outcome:
    """`result` is there where the task is done, `message` where it is not; `peak` in bytes of resident memory."""

    status: Status
    result: dict[str, Any] | None
    message: str
    seconds: float
    peak: float | None = None


class Executor(Protocol):
    """Runs tasks; `slots` at the same time, from as many threads."""

    slots: int

    def run(self, task: Task, limits: Limits, told: Told) -> Outcome:
        """Run a task to its end. A task that fails is an outcome, not an exception."""
        ...


class LocalExecutor:
    """A child process of this one, which dies with it."""

    slots = 1

    def run(self, task: Task, limits: Limits, told: Told) -> Outcome:
        task.folder.mkdir(parents=True, exist_ok=True)
        order, answer = task.folder / f"{task.kind}.task.json", task.folder / f"{task.kind}.result.json"
        document = {"kind": task.kind, "options": task.options, "memory": limits.memory, "parent": os.getpid()}
        order.write_text(json.dumps(document))
        answer.unlink(missing_ok=True)
        start = time.monotonic()
        with (task.folder / f"{task.kind}.log").open("wb") as log:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "pipeline.nightly.child", str(order.resolve()), str(answer.resolve())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            lines, end = _Lines(log, told), start + limits.seconds
            try:
                in_time = lines.follow(child, end) and _ends(child, end)
            finally:  # also where we are interrupted
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)  # and what it started, compilers for instance
                code = child.wait()
                assert child.stdout is not None
                child.stdout.close()
        seconds = time.monotonic() - start
        status = _status(code, in_time, answer)
        written = json.loads(answer.read_text()) if status == "done" else {"result": None, "peak": None}
        return Outcome(status, written["result"], _message(status, code, limits, lines.last), seconds, written["peak"])


class _Lines:
    """What a child prints, into its log and to who wants to know."""

    def __init__(self, log: Any, told: Told) -> None:
        self._log, self._told = log, told
        self.last: list[str] = []

    def follow(self, child: "subprocess.Popen[bytes]", end: float) -> bool:
        """Until the child closes its output; False where the time is over first."""
        assert child.stdout is not None
        stream, rest = child.stdout, b""
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while (left := end - time.monotonic()) > 0:
                if not selector.select(left):
                    continue
                data = os.read(stream.fileno(), 65536)
                if not data:
                    return True
                self._log.write(data)
                self._log.flush()
                *whole, rest = (rest + data).split(b"\n")
                for line in whole:
                    self._take(line.decode(errors="replace").rstrip())
        return False

    def _take(self, line: str) -> None:
        if line.strip():
            self.last = [*self.last, line][-20:]
            self._told(line)


def _ends(child: "subprocess.Popen[bytes]", end: float) -> bool:
    """A child that has closed its output ends in a moment."""
    try:
        child.wait(max(1.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _status(code: int, in_time: bool, answer: Path) -> Status:
    if code == 0 and answer.is_file():
        return "done"
    if not in_time:
        return "timeout"
    if code == REFUSED:
        return "refused"
    return "memory" if code == OUT_OF_MEMORY else "crashed"


def _message(status: Status, code: int, limits: Limits, last: list[str]) -> str:
    said = last[-1].strip().removeprefix("error: ") if last else "it printed nothing"
    if status == "timeout":
        return f"it did not end within {limits.seconds:g} s; its last line: {said}"
    if status == "memory":
        limit = "this machine has" if limits.memory is None else f"{limits.memory:,} bytes"
        return f"it needs more memory than {limit}: {said}"
    if status == "crashed":
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"it ended with {how}; its last line: {said}"
    return "" if status == "done" else said
