"""The program of an engine's process: opens the bundle, and answers what the server's process asks over a socket.

`python -m engines.server.engine_child SOCKET_FD BUNDLE`, started by `engine_link`; BUNDLE is only for those who read
`ps`. Three threads beside the engine's own: one works on what is asked, one sends; what all answers have to say goes
through one queue, and what is in it goes out as one frame, usually all that a step gave. The main thread only reads,
so that nothing keeps it from noticing that the other end of the socket was closed. Then the process ends: a server
that is killed leaves no orphan, even if a step hangs.

Interrupts and termination are ignored, because terminals and service managers send them to every process of a
service, while it is the server that decides when its requests are done. Knows nothing of HTTP.
"""

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import Any, BinaryIO, cast

from numpy.typing import NDArray

from engines.runtime.allocator import exempt_from_collection, share_one_malloc_arena
from engines.runtime.engine import Engine
from engines.runtime.request import Request, RequestError, TokenChunk
from engines.server.messages import (
    Call,
    Cancel,
    Chunk,
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
    messages_from_file,
    portable,
)
from plugins.errors import KilnError

_LOG = logging.getLogger("kiln.engine")


class EngineChild:
    """Serves one engine over one socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._engine: Engine | None = None
        self._close_seconds = 0.0
        self._outbox: SimpleQueue[Message | None] = SimpleQueue()  # None: nothing comes any more
        self._outstanding: dict[tuple[int, int], Callable[[], Any]] = {}  # (call, choice): how to cancel it
        self._handed_out = 0
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="kiln-send", daemon=True)

    def run(self) -> None:
        """Returns when the parent has closed its end, or is no more."""
        self._sender.start()
        threading.Thread(target=self._work, name="kiln-answer", daemon=True).start()
        try:
            with self._connection.makefile("rb") as file:
                for message in messages_from_file(cast(BinaryIO, file)):
                    self._inbox.put(message)
        finally:
            self._end()

    def _work(self) -> None:
        while True:
            message = self._inbox.get()
            if isinstance(message, Call):
                self._answer(message)
            elif isinstance(message, Cancel):
                cancel = self._outstanding.get((message.call, message.choice))
                if cancel is not None:  # else it had its outcome before this came
                    cancel()

    def _answer(self, call: Call) -> None:
        try:
            match call.body:
                case Open() as opening:
                    self._open(call.id, opening)
                case Submit(request):
                    self._submit(call.id, request)
                case Infer() as infer:
                    self._infer(call.id, infer)
                case Ping():
                    if self._opened.failure is not None:  # the server replaces a process that fails a ping
                        raise RuntimeError(f"the engine has stopped: {self._opened.failure!r}")
                    self._outbox.put(Reply(call.id, Pong(len(self._outstanding), self._progress())))
                case GetMetrics():
                    self._outbox.put(Reply(call.id, self._opened.metrics.families()))
        except Exception as error:
            self._fail(call.id, error)

    def _open(self, call: int, opening: Open) -> None:
        self._close_seconds = opening.close_seconds
        logging.getLogger().addHandler(QueueHandler(self._outbox))
        logging.getLogger("kiln").setLevel(opening.log_level)
        _LOG.info("opening %s", opening.spec.path)
        self._engine = Engine.open(**vars(opening.spec))
        exempt_from_collection()
        self._outbox.put(Reply(call, self._engine.info))

    @property
    def _opened(self) -> Engine:
        assert self._engine is not None, "the parent asks for nothing before the engine is open"
        return self._engine

    def _submit(self, call: int, request: Request) -> None:
        streams = self._opened.submit_choices(request)
        for choice, stream in enumerate(streams):
            self._outstanding[call, choice] = stream.cancel
        self._outbox.put(Reply(call, len(streams)))
        for choice, stream in enumerate(streams):
            stream.forward(partial(self._hand_out, call, choice))

    def _hand_out(self, call: int, choice: int, item: TokenChunk | RequestError) -> None:
        """Called by the engine's worker."""
        if isinstance(item, RequestError):
            _LOG.error("a request failed", exc_info=item)
        if isinstance(item, RequestError) or item.finish_reason is not None:
            del self._outstanding[call, choice]
        self._handed_out += 1
        self._outbox.put(Chunk(call, choice, item))

    def _infer(self, call: int, infer: Infer) -> None:
        future = self._opened.submit_infer(infer.inputs, lane=infer.lane, timeout=infer.timeout)
        self._outstanding[call, 0] = future.cancel
        future.add_done_callback(partial(self._inferred, call))

    def _inferred(self, call: int, future: "Future[dict[str, NDArray]]") -> None:
        del self._outstanding[call, 0]
        self._handed_out += 1
        if future.cancelled():
            self._fail(call, KilnError("the request was cancelled, because its caller left or the engine was closed"))
        elif (error := future.exception()) is not None:
            self._fail(call, error)
        else:
            self._outbox.put(Reply(call, future.result()))

    def _fail(self, call: int, error: BaseException) -> None:
        if not isinstance(error, KilnError | TimeoutError):
            _LOG.error("unexpected error", exc_info=error)
        self._outbox.put(Failure(call, portable(error)))

    def _progress(self) -> float:
        """Steps and results so far."""
        metrics, name = self._opened.metrics, self._opened.info.name
        steps = metrics.registry.get_sample_value("kiln_step_seconds_count", {"model": name})
        return self._handed_out + (steps or 0.0)

    def _send(self) -> None:
        try:
            last = False
            while not last:
                messages = [self._outbox.get()]
                while not self._outbox.empty():  # nobody else takes from it
                    messages.append(self._outbox.get())
                last = None in messages
                self._connection.sendall(frame([message for message in messages if message is not None]))
        except OSError:
            return  # the parent is gone, which the main thread sees too
        except BaseException:  # a bug; the parent must not wait for what never comes
            traceback.print_exc()
            os._exit(1)

    def _end(self) -> None:
        """Give what is outstanding its outcome, and tell the parent if it is there; but take no longer than allowed."""
        limit = threading.Timer(self._close_seconds, os._exit, (1,))
        limit.daemon = True
        limit.start()
        if self._engine is not None:  # else it is being opened, which nothing but leaving can interrupt
            self._engine.close()
            self._outbox.put(None)
            self._sender.join()


def main(descriptor: int) -> None:
    """Leaves without the interpreter's own end, which would wait for whatever a thread of a library still does."""
    share_one_malloc_arena()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    try:
        EngineChild(socket.socket(fileno=descriptor)).run()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
