"""The two ends of one request: the worker pushes chunks, callers on any thread or event loop read or are handed them.

Knows nothing of scheduling. Chunks wait without bound, which max_tokens bounds; a slow reader delays nobody.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from engines.runtime.request import Completion, FinishReason, RequestError, TokenChunk, TokenLogprobs


class Stream:
    """One submitted request. Read it with `for`, `async for` or `result()`; each chunk is given to one reader.

    Reading raises RequestError, after the chunks before it, when the request failed. Leaving a loop early does not
    end the request: call `cancel()`.
    """

    def __init__(self, prompt_tokens: int, on_cancel: Callable[[], None]) -> None:
        self._prompt_tokens = prompt_tokens
        self._on_cancel = on_cancel
        self._changed = threading.Condition()
        self._unread: deque[TokenChunk] = deque()
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._completion: Completion | None = None
        self._error: BaseException | None = None
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._give: Callable[[TokenChunk | RequestError], None] | None = None

    @property
    def done(self) -> bool:
        """The request has its outcome; chunks may still be unread."""
        return self._completion is not None

    def cancel(self) -> None:
        """Ask the engine to end the request before its next step; what was generated stays readable.

        Callable at any time and from any thread; without effect on a request that is done.
        """
        if not self.done:
            self._on_cancel()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the outcome, at most `timeout` seconds. Raises TimeoutError or RequestError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"the request is not done after {timeout} s; cancel it or wait longer")
        self._raise_failure()
        assert self._completion is not None
        return self._completion

    def forward(self, give: Callable[[TokenChunk | RequestError], None]) -> None:
        """Hand every chunk to `give` instead of to readers: those unread now, later ones as they come about.

        A failure is handed over as the RequestError that reading would raise. Calls come in order, from the thread that
        pushes, while the stream is locked: `give` must only put the chunk somewhere, and not raise.
        """
        with self._changed:
            self._give = give
            while self._unread:
                give(self._unread.popleft())
            if (failure := self._failure()) is not None:
                give(failure)

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> TokenChunk:
        with self._changed:
            self._changed.wait_for(lambda: self._unread or self.done)
            if self._unread:
                return self._unread.popleft()
        self._raise_failure()
        raise StopIteration

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> TokenChunk:
        while True:
            with self._changed:
                if self._unread:
                    return self._unread.popleft()
                if self.done:
                    break
                loop = asyncio.get_running_loop()
                changed = loop.create_future()
                self._waiters.append((loop, changed))
            await changed
        self._raise_failure()
        raise StopAsyncIteration

    def push(self, chunk: TokenChunk) -> None:
        """For the worker: hand over a chunk; one with a finish reason is the last."""
        with self._changed:
            self._token_ids.extend(chunk.token_ids)
            self._text.append(chunk.text)
            self._logprobs.extend(chunk.logprobs)
            if chunk.finish_reason is not None:
                self._complete(chunk.finish_reason)
            if self._give is None:
                self._unread.append(chunk)
            else:
                self._give(chunk)
            self._wake()

    def fail(self, error: BaseException) -> None:
        """For the worker: end the request with finish reason `error`."""
        with self._changed:
            self._error = error
            self._complete("error")
            if self._give is not None and (failure := self._failure()) is not None:
                self._give(failure)
            self._wake()

    def _complete(self, reason: FinishReason) -> None:
        assert self._completion is None, "a request has one outcome"
        self._completion = Completion(
            tuple(self._token_ids), "".join(self._text), reason, self._prompt_tokens, tuple(self._logprobs)
        )

    def _wake(self) -> None:
        self._changed.notify_all()
        for loop, changed in self._waiters:
            with suppress(RuntimeError):  # that event loop is closed: nobody waits there
                loop.call_soon_threadsafe(_resolve, changed)
        self._waiters.clear()

    def _raise_failure(self) -> None:
        if (failure := self._failure()) is not None:
            raise failure

    def _failure(self) -> RequestError | None:
        if self._error is None:
            return None
        assert self._completion is not None
        message = " ".join(str(self._error).split()) or type(self._error).__name__
        failure = RequestError(
            f"the request failed after {len(self._completion.token_ids)} tokens: {message}; the engine goes on: "
            "submit it again, and lower tokens_per_step or kv_blocks if memory ran out",
            self._completion,
        )
        failure.__cause__ = self._error
        return failure


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
