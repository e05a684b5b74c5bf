"""What the server's process and an engine's process say to each other, and how it goes over their socket.

A frame is its length as 8 bytes, little endian, and one pickled list of messages, so that what came about together
travels together. Pickle is safe here: both ends are the same installation, on a socket pair that nobody else can open.
Arrays travel by value inside the pickle: a copy at each end costs far less than a model does with the same data.
"""

import pickle
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import LogRecord
from pathlib import Path
from typing import Any, BinaryIO, Literal

from numpy.typing import NDArray

from engines.runtime.batch_queue import BatchingConfig
from engines.runtime.request import Request, RequestError, TokenChunk
from engines.runtime.scheduler import SchedulerConfig
from engines.runtime.sequence import Lane
from plugins.errors import KilnError

LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class EngineSpec:
    """Which bundle to open, and how: what `Engine.open` takes."""

    path: Path
    name: str | None = None
    kv: Literal["paged", "static"] = "paged"
    kv_blocks: int | None = None
    swap_blocks: int = 0
    window: int | None = None
    config: SchedulerConfig | None = None
    batching: BatchingConfig | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Open:
    """The first call. Answered by the engine's EngineInfo."""

    spec: EngineSpec
    log_level: int
    """Of the logger `kiln`; records are sent to the server's process."""
    close_seconds: float
    """The child exits so long after it lost its parent, even if a step hangs."""


@dataclass(frozen=True)
class Submit:
    """Answered by the number of answers, then their chunks."""

    request: Request


@dataclass(frozen=True)
class Infer:
    """Answered by the outputs."""

    inputs: Mapping[str, NDArray]
    lane: Lane
    timeout: float | None


@dataclass(frozen=True)
class Ping:
    """Answered by a Pong."""


@dataclass(frozen=True)
class Pong:
    """Requests that have no outcome yet, and a number that grows as long as the engine gets on."""

    outstanding: int
    progress: float


@dataclass(frozen=True)
class GetMetrics:
    """Answered by prometheus_client's metric families."""


@dataclass(frozen=True)
class Call:
    """From the parent. Gets one Reply or Failure with its id."""

    id: int
    body: Open | Submit | Infer | Ping | GetMetrics


@dataclass(frozen=True)
class Cancel:
    """From the parent: end one answer of a call, if it has not ended."""

    call: int
    choice: int = 0


@dataclass(frozen=True)
class Reply:
    call: int
    value: Any


@dataclass(frozen=True)
class Failure:
    call: int
    error: Exception


@dataclass(frozen=True)
class Chunk:
    """The next piece of an answer, or its failure."""

    call: int
    choice: int
    item: TokenChunk | RequestError


Message = Call | Cancel | Reply | Failure | Chunk | LogRecord


def frame(messages: Sequence[Message]) -> bytes:
    body = pickle.dumps(messages, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


def messages_from_file(file: BinaryIO) -> Iterator[Message]:
    """Messages as they come, until the other end closes or dies, be it in the middle of one."""
    while (header := _read(file, LENGTH.size)) and (body := _read(file, *LENGTH.unpack(header))):
        yield from pickle.loads(body)


def _read(file: BinaryIO, length: int) -> bytes | None:
    """So many bytes, or None when there are fewer: a socket that dies with something unread says so by an error."""
    try:
        read = file.read(length)
    except ConnectionError:
        return None
    return read if len(read) == length else None


def portable(error: BaseException) -> Exception:
    """An error as the other process gets it: of its own type where callers tell it apart, and where it can be sent."""
    if isinstance(error, KilnError | TimeoutError):
        try:
            return pickle.loads(pickle.dumps(error))
        except Exception:  # a constructor that takes something else than the message
            return KilnError(str(error)) if isinstance(error, KilnError) else TimeoutError(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")
