"""One engine process from its start to its end, as the server sees it: calls, answers, and how it ended.

Everything happens on the event loop that started it. Chunks come in frames, so that the loop wakes up once for what a
step gave to hundreds of answers. Chunks that nobody reads yet wait here without bound, which max_tokens bounds; a
request that waits for its reply bounds what waits to be sent. Does not know what is done when a process has ended:
`engine_process` does.
"""

import asyncio
import itertools
import logging
import os
import pickle
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from numpy.typing import NDArray
from prometheus_client.metrics_core import Metric

from engines.runtime.info import EngineInfo
from engines.runtime.request import Request, TokenChunk
from engines.runtime.sequence import Lane
from engines.server.messages import (
    LENGTH,
    Call,
    Cancel,
    Chunk,
    EngineSpec,
    Failure,
    GetMetrics,
    Infer,
    Message,
    Open,
    Ping,
    Pong,
    Reply,
    Submit,
    frame,
)
from engines.server.served import EngineDiedError

_LOG = logging.getLogger("kiln.engine")
_READ_AHEAD = 2**20
"""Bytes that the loop buffers before the child has to wait."""

_HINTS = {
    "SIGKILL": " (somebody killed it, or memory ran out)",
    "SIGSEGV": " (a crash in native code)",
    "SIGABRT": " (a failed check in native code)",
}


class RemoteStream:
    """The chunks of one answer. Implements `TokenStream`; only to be used on the event loop."""

    def __init__(self, on_cancel: Callable[[], None]) -> None:
        self._on_cancel = on_cancel
        self._items: asyncio.Queue[TokenChunk | Exception] = asyncio.Queue()
        self._done = False  # the last one is in the queue
        self._read = False  # and was taken out of it

    def cancel(self) -> None:
        if not self._done:
            self._on_cancel()

    def put(self, item: TokenChunk | Exception) -> None:
        self._done = isinstance(item, Exception) or item.finish_reason is not None
        self._items.put_nowait(item)

    @property
    def done(self) -> bool:
        return self._done

    def __aiter__(self) -> AsyncIterator[TokenChunk]:
        return self

    async def __anext__(self) -> TokenChunk:
        if self._read:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, Exception):
            self._read = True
            raise item
        self._read = item.finish_reason is not None
        return item


class EngineLink:
    """Made by `start`. When the process has ended, `fail` must be called, or callers wait for ever."""

    def __init__(self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[tuple[int, int], RemoteStream] = {}
        self._verdict: str | None = None
        self._failure: str | None = None
        self._closing = False
        self._reading = asyncio.create_task(self._read(), name=f"kiln-engine-{process.pid}")

    @classmethod
    async def start(cls, spec: EngineSpec) -> "EngineLink":
        """A process that has opened nothing yet."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "engines.server.engine_child", str(theirs.fileno()), str(spec.path)),
                    stdin=DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # an interrupt at the terminal is for the server, which lets requests end
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # imports what we import
                )
            except BaseException:
                ours.close()
                raise
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_READ_AHEAD)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def open(self, spec: EngineSpec, close_seconds: float) -> EngineInfo:
        """Open the bundle. Raises KilnError as `Engine.open`."""
        level = logging.getLogger("kiln").getEffectiveLevel()
        return await self._call(next(self._ids), Open(spec, level, close_seconds))

    async def submit(self, request: Request) -> list[RemoteStream]:
        call = next(self._ids)
        streams = [RemoteStream(partial(self._cancel, call, choice)) for choice in range(request.sampling.n)]
        self._streams |= {(call, choice): stream for choice, stream in enumerate(streams)}
        try:
            count = await self._call(call, Submit(request))
        except BaseException:  # refused, or nobody waits for it any more
            for choice in range(len(streams)):
                self._streams.pop((call, choice), None)
                self._cancel(call, choice)
            raise
        assert count == len(streams), f"{count} answers for n={len(streams)}"
        return streams

    async def infer(self, inputs: Mapping[str, NDArray], lane: Lane, timeout: float | None) -> dict[str, NDArray]:
        call = next(self._ids)
        try:
            return await self._call(call, Infer(inputs, lane, timeout))
        except asyncio.CancelledError:
            self._cancel(call, 0)
            raise

    async def ping(self) -> Pong:
        return await self._call(next(self._ids), Ping())

    async def metrics(self) -> list[Metric]:
        return await self._call(next(self._ids), GetMetrics())

    def kill(self, why: str) -> None:
        """End the process at once; `ended` will say why."""
        if self._process.returncode is None:
            self._verdict = f"was killed by the server, because {why}"
            self._process.kill()

    async def close(self, limit: float) -> None:
        """Let the engine end what is outstanding and exit; after `limit` seconds kill it."""
        if not (self._closing or self._writer.is_closing()):
            self._closing = True
            self._writer.write_eof()
        try:
            async with asyncio.timeout(limit):
                await self.ended()
        except TimeoutError:
            self.kill(f"it did not end within {limit:g} s")
            await self.ended()

    async def ended(self) -> str:
        """Wait until the process is no more, and say how it ended."""
        await asyncio.wait([self._reading])
        code = await self._process.wait()
        return self._verdict or how_it_ended(code)

    def fail(self, message: str) -> None:
        """End everything that is outstanding, and whatever still comes, with an EngineDiedError."""
        self._failure = message
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDiedError(message))
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.put(EngineDiedError(message))

    async def _call(self, call: int, body: Open | Submit | Infer | Ping | GetMetrics) -> Any:
        if self._failure is not None:
            raise EngineDiedError(self._failure)
        future = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            self._send(Call(call, body))
            return await future
        finally:
            del self._calls[call]

    def _cancel(self, call: int, choice: int) -> None:
        self._send(Cancel(call, choice))

    def _send(self, message: Message) -> None:
        if not (self._closing or self._writer.is_closing()):  # else the end is near, and is the answer
            self._writer.write(frame([message]))

    async def _read(self) -> None:
        """Take what comes, until the other end is closed."""
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                    for message in pickle.loads(await self._reader.readexactly(length)):
                        self._take(message)
        except Exception:  # a bug, after which no answer can be relied on
            _LOG.exception("the engine's process %d sent what cannot be read", self.pid)
            self.kill("it sent what cannot be read")
        finally:
            self._writer.close()

    def _take(self, message: Message) -> None:
        """What nobody waits for any more is dropped."""
        match message:
            case Chunk(call, choice, item):
                stream = self._streams.get((call, choice))
                if stream is not None:
                    stream.put(item)
                    if stream.done:
                        del self._streams[call, choice]
            case Reply(call, value):
                if (future := self._calls.get(call)) is not None and not future.done():
                    future.set_result(value)
            case Failure(call, error):
                if (future := self._calls.get(call)) is not None and not future.done():
                    future.set_exception(error)
            case logging.LogRecord():
                logger = logging.getLogger(message.name)
                if logger.isEnabledFor(message.levelno):
                    logger.handle(message)


def how_it_ended(code: int) -> str:
    """An exit status in words; negative is a signal's number."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return f"was ended by {name}{_HINTS.get(name, '')}"
