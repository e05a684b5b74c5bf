"""Reads the streams of one request as one: whichever choice has something new comes first.

Knows the runtime's streams and nothing of C. Safe from several threads; each chunk is given to one of them.
"""

import queue
import threading
from collections.abc import Sequence
from functools import partial

from engines.runtime.request import RequestError, TokenChunk
from engines.runtime.stream import Stream

_Item = tuple[int, TokenChunk | RequestError]


class ChoiceReader:
    """The chunks of a request's choices in the order in which they came. Takes the streams over."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = tuple(streams)
        self._unread: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()  # None: all choices have ended
        self._lock = threading.Lock()
        self._unfinished = len(self._streams)
        for choice, stream in enumerate(self._streams):
            stream.forward(partial(self._take, choice))

    def wait(self, timeout: float | None) -> tuple[int, TokenChunk] | None:
        """The next chunk and its choice; None when all choices have their outcome and everything was read.

        Raises TimeoutError when there is nothing after `timeout` seconds, and RequestError once for a failed choice.
        """
        try:
            item = self._unread.get(timeout=timeout) if timeout != 0 else self._unread.get_nowait()
        except queue.Empty:
            raise TimeoutError(f"nothing came within {timeout} s; wait again") from None
        if item is None:
            self._unread.put(None)  # for everybody else who waits
            return None
        choice, chunk = item
        if isinstance(chunk, TokenChunk):
            return choice, chunk
        if len(self._streams) == 1:
            raise chunk
        raise RequestError(f"choice {choice}: {chunk}", chunk.completion) from chunk

    def cancel(self) -> None:
        """End what is not done."""
        for stream in self._streams:
            stream.cancel()

    def _take(self, choice: int, chunk: TokenChunk | RequestError) -> None:
        self._unread.put((choice, chunk))
        if isinstance(chunk, RequestError) or chunk.finish_reason is not None:
            with self._lock:
                self._unfinished -= 1
                if self._unfinished == 0:
                    self._unread.put(None)
