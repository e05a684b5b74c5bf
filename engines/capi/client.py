"""A Python binding to the function table of `libkiln.so`, through cffi's ABI mode: no compiler, only the library.

`Library` has one method for each function and works on plain handles; `ClientEngine` and `ClientStream` are objects
over them. It goes the way that a C program goes, so both see one behaviour: values are checked on the other side, not
here. It shares the runtime's request and chunk types, and knows nothing else of it.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.capi.build import declarations
from engines.capi.convert import ALL_TOKENS, FINISH, GUIDANCE, LANES, dtype_from_name
from engines.runtime.request import Request, TokenChunk, TokenLogprobs
from engines.runtime.sequence import Lane
from plugins.errors import KilnError

VERSION = 1
"""The version of the function table that this binding is written for."""
Handle = Any
"""A cffi pointer to kiln_engine or kiln_stream; an address (int) is taken too."""


class Code(IntEnum):
    """kiln_code."""

    INVALID_ARGUMENT = 1
    INVALID_HANDLE = 2
    BAD_BUNDLE = 3
    QUEUE_FULL = 4
    TIMED_OUT = 5
    REQUEST_FAILED = 6
    NO_PYTHON = 7
    INTERRUPTED = 8
    OUT_OF_MEMORY = 9
    INTERNAL = 10


class CApiError(KilnError):
    """A call that returned a status."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class Library:
    """A loaded `libkiln.so`. Every method raises CApiError; those that wait let other threads run."""

    def __init__(self, path: str | Path) -> None:
        """Raises KilnError when the file is no libkiln, or one that does not know `VERSION`."""
        from cffi import FFI

        self.ffi = FFI()
        self.ffi.cdef(declarations() + "const kiln_api *kiln_get_api(uint32_t version);")
        try:
            self._lib = self.ffi.dlopen(str(path))
            self.table = self._lib.kiln_get_api(VERSION)
        except (OSError, AttributeError) as error:
            raise KilnError(f"cannot load {path}: {error}; build it with kiln capi build") from error
        if self.table == self.ffi.NULL:
            raise KilnError(f"{path} does not know version {VERSION} of the function table; build it with this Kiln")

    def version(self) -> str:
        return self.ffi.string(self.table.library_version()).decode()

    def open(
        self,
        bundle: str | Path,
        options: Mapping[str, Any] | None = None,
        *,
        python_executable: str | None = None,
        python_path: str | None = None,
    ) -> Handle:
        params = self.ffi.new("kiln_open_params *")
        self.check(self.table.default_open_params(params, self.ffi.sizeof("kiln_open_params")))
        texts = {"bundle": str(bundle), "python_executable": python_executable, "python_path": python_path}
        texts["options"] = None if options is None else json.dumps(options)
        owners = {name: self._text(text) for name, text in texts.items()}
        for name, memory in owners.items():
            setattr(params, name, memory)
        engine = self.ffi.new("kiln_engine **")
        self.check(self.table.open(params, engine))
        return engine[0]

    def close(self, engine: Handle) -> None:
        self.check(self.table.close(self._engine(engine)))

    def describe(self, engine: Handle) -> dict[str, Any]:
        text = self.ffi.new("const char **")
        self.check(self.table.describe(self._engine(engine), text))
        return json.loads(self._taken_text(text[0]))

    def metrics(self, engine: Handle) -> str:
        text = self.ffi.new("const char **")
        self.check(self.table.metrics(self._engine(engine), text))
        return self._taken_text(text[0])

    def tokenize(self, engine: Handle, text: str) -> list[int]:
        return self._taken_tokens(self.table.tokenize, engine, text)

    def tokenize_chat(self, engine: Handle, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self._taken_tokens(self.table.tokenize_chat, engine, json.dumps(messages))

    def detokenize(self, engine: Handle, tokens: Sequence[int]) -> str:
        text = self.ffi.new("const char **")
        memory = self.ffi.new("int32_t[]", list(tokens))
        self.check(self.table.detokenize(self._engine(engine), memory, len(tokens), text))
        return self._taken_text(text[0])

    def submit(self, engine: Handle, request: Request) -> Handle:
        c = self.ffi.new("kiln_request *")
        self.check(self.table.default_request(c, self.ffi.sizeof("kiln_request")))
        owners = self._fill_request(c, request)
        stream = self.ffi.new("kiln_stream **")
        self.check(self.table.submit(self._engine(engine), c, stream))
        del owners  # the library has copied them
        return stream[0]

    def wait(self, stream: Handle, timeout: float = math.inf) -> tuple[int, TokenChunk] | None:
        """The next chunk and its choice; None at the end. Raises TimeoutError when nothing came in time."""
        event, chunk = self.ffi.new("kiln_event *"), self.ffi.new("const kiln_chunk **")
        self.check(self.table.wait(self._stream(stream), timeout, event, chunk))
        if event[0] == self._lib.KILN_NOTHING_YET:
            raise TimeoutError(f"nothing came within {timeout} s; wait again")
        if event[0] == self._lib.KILN_END:
            return None
        try:
            return chunk[0].choice, self._chunk(chunk[0])
        finally:
            self.release(chunk[0])

    def cancel(self, stream: Handle) -> None:
        self.check(self.table.cancel(self._stream(stream)))

    def stream_close(self, stream: Handle) -> None:
        self.check(self.table.stream_close(self._stream(stream)))

    def infer(
        self,
        engine: Handle,
        inputs: Mapping[str, NDArray[Any]],
        *,
        lane: Lane = "interactive",
        timeout: float | None = None,
    ) -> dict[str, NDArray[Any]]:
        c = self.ffi.new("kiln_inference *")
        self.check(self.table.default_inference(c, self.ffi.sizeof("kiln_inference")))
        tensors, owners = self.ffi.new("kiln_tensor[]", len(inputs)), []
        for tensor, (name, given) in zip(tensors, inputs.items(), strict=True):
            array = np.asarray(given, order="C")
            shape, data = self.ffi.new("int64_t[]", list(array.shape)), array.tobytes()
            texts = [self._text(name), self._text(array.dtype.name)]
            tensor.name, tensor.dtype, tensor.shape, tensor.rank = *texts, shape, array.ndim
            tensor.data, tensor.bytes = self.ffi.from_buffer(data), len(data)
            owners += [*texts, shape, data]
        c.inputs, c.input_count, c.lane = tensors, len(inputs), LANES.index(lane)
        if timeout is not None:
            c.timeout = timeout
        outputs = self.ffi.new("const kiln_outputs **")
        self.check(self.table.infer(self._engine(engine), c, outputs))
        try:
            return dict(self._array(outputs[0].tensors[number]) for number in range(outputs[0].count))
        finally:
            self.release(outputs[0])

    def release(self, memory: Any) -> None:
        self.check(self.table.release(self.ffi.cast("const void *", memory)))

    def check(self, status: Any) -> None:
        """Free a status and raise what it says, if it says anything; KeyboardInterrupt for an interrupted call."""
        if status == self.ffi.NULL:
            return
        code = Code(self.table.status_code(status))
        message = self.ffi.string(self.table.status_message(status)).decode(errors="replace")
        self.table.status_free(status)
        if code is Code.INTERRUPTED:
            raise KeyboardInterrupt
        raise CApiError(code, message)

    def _engine(self, handle: Handle) -> Any:
        return self.ffi.cast("kiln_engine *", handle)

    def _stream(self, handle: Handle) -> Any:
        return self.ffi.cast("kiln_stream *", handle)

    def _text(self, text: str | None) -> Any:
        return self.ffi.NULL if text is None else self.ffi.new("char[]", text.encode(errors="surrogateescape"))

    def _taken_text(self, pointer: Any) -> str:
        try:
            return self.ffi.string(pointer).decode()
        finally:
            self.release(pointer)

    def _taken_tokens(self, function: Any, engine: Handle, text: str) -> list[int]:
        tokens, count = self.ffi.new("const int32_t **"), self.ffi.new("size_t *")
        self.check(function(self._engine(engine), self._text(text), tokens, count))
        try:
            return self.ffi.unpack(tokens[0], count[0]) if count[0] else []
        finally:
            self.release(tokens[0])

    def _fill_request(self, c: Any, request: Request) -> list[Any]:
        """Returns what must live until the request is submitted."""
        sampling, owners = request.sampling, [self._text(request.tenant)]
        c.tenant = owners[0]
        if isinstance(request.prompt, str):
            owners.append(self._text(request.prompt))
            c.prompt = owners[-1]
        else:
            owners.append(self.ffi.new("int32_t[]", request.prompt))
            c.tokens, c.token_count = owners[-1], len(request.prompt)
        for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
            setattr(c, name, getattr(sampling, name))
        c.lane, c.n, c.ignore_eos = LANES.index(request.lane), sampling.n, sampling.ignore_eos
        c.timeout = math.inf if request.timeout is None else request.timeout
        c.max_tokens = ALL_TOKENS if sampling.max_tokens is None else sampling.max_tokens
        c.top_k = ALL_TOKENS if sampling.top_k is None else sampling.top_k
        c.logprobs, c.top_logprobs = sampling.logprobs is not None, sampling.logprobs or 0
        c.seeded, c.seed = sampling.seed is not None, sampling.seed or 0
        c.stop, c.stop_count = self._texts(sampling.stop, owners), len(sampling.stop)
        owners.append(self.ffi.new("kiln_token_bias[]", list(sampling.logit_bias.items())))
        c.logit_bias, c.logit_bias_count = owners[-1], len(sampling.logit_bias)
        if sampling.guidance is not None:
            c.guidance = GUIDANCE.index(sampling.guidance.kind)
            if isinstance(sampling.guidance.value, str):
                owners.append(self._text(sampling.guidance.value))
                c.guide = owners[-1]
            else:
                c.choices = self._texts(sampling.guidance.value, owners)
                c.choice_count = len(sampling.guidance.value)
        return owners

    def _texts(self, texts: Sequence[str], owners: list[Any]) -> Any:
        memory = [self._text(text) for text in texts]
        array = self.ffi.new("const char *[]", memory)
        owners += [*memory, array]
        return array

    def _chunk(self, c: Any) -> TokenChunk:
        return TokenChunk(
            tuple(self.ffi.unpack(c.tokens, c.token_count)) if c.token_count else (),
            bytes(self.ffi.buffer(c.text, c.text_length)).decode(),
            FINISH[c.finish],
            tuple(self._logprobs(c.logprobs[number]) for number in range(c.logprobs_count)),
        )

    def _logprobs(self, c: Any) -> TokenLogprobs:
        top = tuple((c.top[number].token, c.top[number].logprob) for number in range(c.top_count))
        return TokenLogprobs(c.chosen.token, c.chosen.logprob, top)

    def _array(self, c: Any) -> tuple[str, NDArray[Any]]:
        name, dtype = self.ffi.string(c.name).decode(), dtype_from_name(self.ffi.string(c.dtype).decode(), "an output")
        shape = [c.shape[axis] for axis in range(c.rank)]
        return name, np.frombuffer(bytes(self.ffi.buffer(c.data, c.bytes)), dtype).reshape(shape)


@dataclass(frozen=True)
class ClientStream:
    """One submitted request; iterating gives choice and chunk until every choice has its outcome."""

    library: Library
    handle: Handle

    def __iter__(self) -> Iterator[tuple[int, TokenChunk]]:
        while (found := self.library.wait(self.handle)) is not None:
            yield found

    def cancel(self) -> None:
        self.library.cancel(self.handle)

    def __enter__(self) -> "ClientStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.library.stream_close(self.handle)


@dataclass(frozen=True)
class ClientEngine:
    """An engine behind the C API, for a with statement. `open` gives one."""

    library: Library
    handle: Handle

    @classmethod
    def open(cls, library: Library, bundle: str | Path, options: Mapping[str, Any] | None = None) -> "ClientEngine":
        return cls(library, library.open(bundle, options))

    def describe(self) -> dict[str, Any]:
        return self.library.describe(self.handle)

    def metrics(self) -> str:
        return self.library.metrics(self.handle)

    def submit(self, request: Request) -> ClientStream:
        return ClientStream(self.library, self.library.submit(self.handle, request))

    def infer(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        return self.library.infer(self.handle, inputs)

    def __enter__(self) -> "ClientEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.library.close(self.handle)
