"""One request at the replicas: what comes back, whether it may be sent again, and Ray's errors in Kiln's terms."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from engines.runtime.request import Request, TokenChunk
from engines.runtime.scheduler import QueueFullError
from engines.server.engine_link import RemoteStream
from engines.server.served import EngineDiedError
from pipeline.deploy.wire import Accepted, Chunks, Refused, Route
from plugins.errors import KilnError, first_line


class ReplicaLostError(EngineDiedError):
    """A replica failed a request before it gave anything of the answer: another one may have it."""

    def __init__(self, message: str, replica: str) -> None:
        super().__init__(message)
        self.replica = replica


class GenerateCall:
    """The answers to one request. `on_cancelled` is called when nobody waits for any of them."""

    def __init__(self, request: Request, route: Route, deadline: float | None) -> None:
        self._request, self._route, self._deadline = request, route, deadline
        self.streams = [RemoteStream(partial(self._cancel, choice)) for choice in range(request.sampling.n)]
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_cancelled: Callable[[], Any] = lambda: None
        self.failed = False
        """Whether the engine failed an answer by itself: a step, or the sampler."""
        self._tokens, self._begun = 0, False

    async def once(self, handle: Any, avoid: frozenset[str]) -> int:
        """Ask one replica; the tokens that it generated. Raises ReplicaLostError where another one may be asked."""
        left = None if self._deadline is None else max(self._deadline - time.monotonic(), 1e-3)
        asked = replace(self._request, timeout=left)
        response = handle.options(stream=True).generate.remote(asked, replace(self._route, avoid=avoid))
        replica = ""
        try:
            async for message in response:
                if not isinstance(message, Chunks):
                    replica = message.replica
                self._take(message)
            if not all(stream.done for stream in self.streams):
                raise EngineDiedError(f"the replica {replica} ended before its answer did")
        except Exception as error:
            raise self._lost(translated(error, replica), replica) from error
        finally:
            response.cancel()
        return self._tokens

    def fail(self, error: Exception) -> None:
        """What ends every answer that has not ended."""
        if not self.accepted.done():
            self.accepted.set_exception(error)
        for stream in self.streams:
            if not stream.done:
                stream.put(error)

    def _take(self, message: Accepted | Refused | Chunks) -> None:
        match message:
            case Accepted():
                if not self.accepted.done():
                    self.accepted.set_result(None)
            case Refused(_, error):
                raise error
            case Chunks(items):
                for choice, item in items:
                    if isinstance(item, EngineDiedError):
                        raise item
                    self._begun = True
                    if isinstance(item, TokenChunk):
                        self._tokens += len(item.token_ids)
                    else:
                        self.failed = True
                    if not self.streams[choice].done:  # else its reader has left
                        self.streams[choice].put(item)

    def _lost(self, error: Exception, replica: str) -> Exception:
        """The error as it concerns this request: whether it may be sent again."""
        if not isinstance(error, EngineDiedError):
            return error
        if not self._begun:
            return ReplicaLostError(str(error), replica)
        return EngineDiedError(
            f"{error}; {self._tokens} tokens of the answer had been sent, so it cannot go on elsewhere: send the "
            "request again"
        )

    def _cancel(self, choice: int) -> None:
        self.streams[choice].put(TokenChunk((), "", "cancelled"))
        if all(stream.done for stream in self.streams):
            self.on_cancelled()


def translated(error: Exception, replica: str) -> Exception:
    """An error of Ray's or of Serve's in Kiln's terms; what is none of theirs stays."""
    if isinstance(error, KilnError):
        return error
    from ray.exceptions import RayActorError, RayError, RayTaskError
    from ray.serve.exceptions import BackPressureError, RayServeException

    which = f"the replica {replica}" if replica else "the replica"
    if isinstance(error, BackPressureError):
        return QueueFullError("too many requests wait for a replica; try again later")
    if isinstance(error, RayTaskError) and not isinstance(error.cause, RayActorError):
        return RuntimeError(f"{which} failed: {error}")
    if isinstance(error, RayError | RayServeException):
        return ReplicaLostError(f"{which} died ({first_line(error)})", replica)
    return error
