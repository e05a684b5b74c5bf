"""The Python side of libkiln: what the functions of `kiln.h` do once Python runs.

Each method of `Boundary` is the embedded function of its name. Whatever one raises becomes a status, so that nothing
crosses into C. Null out-parameters, sizes of structs and calls before the first `open` are table.c's to refuse.
"""

import json
import traceback
from collections.abc import Callable
from typing import Any

from engines.bundle import BundleError
from engines.capi.choices import ChoiceReader
from engines.capi.convert import Converter, Lent, timeout_from_c
from engines.capi.handles import HandleError, Handles, LentMemory
from engines.capi.options import engine_arguments_from_json
from engines.runtime.engine import Engine
from engines.runtime.request import RequestError
from engines.runtime.scheduler import QueueFullError
from engines.runtime.score import score
from plugins.errors import KilnError

CODES: tuple[tuple[type[BaseException], str], ...] = (
    (HandleError, "KILN_INVALID_HANDLE"),
    (BundleError, "KILN_BAD_BUNDLE"),
    (QueueFullError, "KILN_QUEUE_FULL"),
    (RequestError, "KILN_REQUEST_FAILED"),
    (KilnError, "KILN_INVALID_ARGUMENT"),
    (TimeoutError, "KILN_TIMED_OUT"),
    (KeyboardInterrupt, "KILN_INTERRUPTED"),
    (MemoryError, "KILN_OUT_OF_MEMORY"),
)
"""The code of an error; the first that fits. Anything else is KILN_INTERNAL."""


class Boundary:
    """The engines, streams and lent memory of one loaded libkiln."""

    def __init__(self, ffi: Any, lib: Any) -> None:
        self._ffi = ffi
        self._lib = lib
        self._convert = Converter(ffi)
        self._handles = Handles()
        self._lent = LentMemory()
        self.no_status = ffi.NULL
        """Success."""

    def open(self, params: Any, engine: Any) -> None:
        bundle = self._convert.text(params.bundle, "bundle")
        arguments: dict[str, Any] = {}
        if params.options != self._ffi.NULL:
            arguments = engine_arguments_from_json(self._convert.text(params.options, "options"))
        opened = Engine.open(bundle, **arguments)
        if opened.info.kind == "decoder":
            _warm_up(opened)
        engine[0] = self._new_handle("kiln_engine *", opened)

    def close(self, engine: Any) -> None:
        self._handles.remove(self._address(engine), "kiln_engine", Engine).close()

    def close_all(self) -> None:
        """For the end of the program."""
        for engine in self._handles.all(Engine):
            engine.close()

    def describe(self, engine: Any, text: Any) -> None:
        self._lend(self._convert.c_from_text(json.dumps(self._engine(engine).info.to_dict())), text)

    def metrics(self, engine: Any, text: Any) -> None:
        self._lend(self._convert.c_from_text(self._engine(engine).metrics.text()), text)

    def tokenize(self, engine: Any, text: Any, tokens: Any, count: Any) -> None:
        tokenizer = self._engine(engine).tokenizer
        self._lend_tokens(tokenizer.encode(self._convert.text(text, "text")), tokens, count)

    def tokenize_chat(self, engine: Any, messages: Any, tokens: Any, count: Any) -> None:
        tokenizer = self._engine(engine).tokenizer
        text = self._convert.text(messages, "messages")
        try:
            chat = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise KilnError(f"messages is not JSON ({error}); expected an array of objects") from error
        if not isinstance(chat, list):
            raise KilnError(f"messages is {text!r:.80}; expected a JSON array of objects with role and content")
        self._lend_tokens(tokenizer.chat_prompt(chat), tokens, count)

    def detokenize(self, engine: Any, tokens: Any, count: int, text: Any) -> None:
        opened = self._engine(engine)
        token_ids = self._convert.tokens(tokens, count)
        for token in token_ids:
            if not 0 <= token < opened.info.vocab_size:
                raise KilnError(f"tokens has the id {token}; expected 0 to {opened.info.vocab_size - 1}")
        self._lend(self._convert.c_from_text(opened.tokenizer.decode(token_ids)), text)

    def submit(self, engine: Any, request: Any, stream: Any) -> None:
        opened = self._engine(engine)
        reader = ChoiceReader(opened.submit_choices(self._convert.request_from_c(request)))
        stream[0] = self._new_handle("kiln_stream *", reader)

    def wait(self, stream: Any, timeout: float, event: Any, chunk: Any) -> None:
        reader = self._stream(stream)
        try:
            found = reader.wait(timeout_from_c(timeout))
        except TimeoutError:
            return  # the event is KILN_NOTHING_YET already
        if found is not None:
            self._lend(self._convert.c_from_chunk(*found), chunk)
        event[0] = self._lib.KILN_END if found is None else self._lib.KILN_CHUNK

    def cancel(self, stream: Any) -> None:
        self._stream(stream).cancel()

    def stream_close(self, stream: Any) -> None:
        self._handles.remove(self._address(stream), "kiln_stream", ChoiceReader).cancel()

    def infer(self, engine: Any, inference: Any, outputs: Any) -> None:
        opened = self._engine(engine)
        arrays, lane, timeout = self._convert.arrays_from_c(inference)
        self._lend(self._convert.c_from_outputs(opened.infer(arrays, lane=lane, timeout=timeout)), outputs)

    def release(self, memory: Any) -> None:
        self._lent.release(self._address(memory))

    def status_of(self, error: BaseException) -> Any:
        """A status, which the caller owns, for what went wrong."""
        name = next((name for type_, name in CODES if isinstance(error, type_)), "KILN_INTERNAL")
        message = str(error) or type(error).__name__
        if name == "KILN_INTERNAL":
            frames = traceback.extract_tb(error.__traceback__)
            message = f"{type(error).__name__}: {message} ({frames[-1].filename}:{frames[-1].lineno})"
        return self._lib.new_status(getattr(self._lib, name), message.encode(errors="replace"))

    def _engine(self, handle: Any) -> Engine:
        return self._handles.get(self._address(handle), "kiln_engine", Engine)

    def _stream(self, handle: Any) -> ChoiceReader:
        return self._handles.get(self._address(handle), "kiln_stream", ChoiceReader)

    def _new_handle(self, type_: str, thing: object) -> Any:
        return self._ffi.cast(type_, self._handles.add(type_.removesuffix(" *"), thing))

    def _address(self, pointer: Any) -> int:
        return int(self._ffi.cast("uintptr_t", pointer))

    def _lend(self, lent: Lent, out: Any) -> None:
        pointer, owners = lent
        self._lent.lend(self._address(pointer), *owners)
        out[0] = pointer

    def _lend_tokens(self, token_ids: list[int], tokens: Any, count: Any) -> None:
        self._lend(self._convert.c_from_tokens(token_ids), tokens)
        count[0] = len(token_ids)


def _warm_up(engine: Engine) -> None:
    """Compute one token, so that everything a step needs was made once before start.c's `close_at_exit`."""
    try:
        for _ in score(engine.backend, [0]):
            pass
    except BaseException:
        engine.close()
        raise


def connect(ffi: Any, lib: Any) -> None:
    """Make the methods of a new `Boundary` the embedded functions of a library."""
    boundary = Boundary(ffi, lib)
    undescribed = ffi.cast("kiln_status *", lib.UNDESCRIBED)
    for name in EMBEDDED:
        ffi.def_extern(name=f"py_{name}", error=undescribed)(_with_status(boundary, getattr(boundary, name)))
    ffi.def_extern(name="py_close_all")(boundary.close_all)


EMBEDDED = (
    *("open", "close", "describe", "metrics", "tokenize", "tokenize_chat", "detokenize"),
    *("submit", "wait", "cancel", "stream_close", "infer", "release"),
)


def _with_status(boundary: Boundary, function: Callable[..., None]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        try:
            function(*arguments)
        except BaseException as error:  # also KeyboardInterrupt and SystemExit: none may cross into C
            return boundary.status_of(error)
        return boundary.no_status

    return call
