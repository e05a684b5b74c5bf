"""C structs to the runtime's types and back.

Copies everything that comes in, so that a caller may reuse its memory at once, and gives out memory with its owners.
Null pointers and bytes that are no UTF-8 are refused with the field's name; values are the runtime's to check.
"""

import threading
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engines.runtime.request import (
    FinishReason,
    Guidance,
    GuidanceKind,
    Request,
    SamplingParams,
    TokenChunk,
    TokenLogprobs,
)
from engines.runtime.sequence import Lane
from plugins.errors import KilnError

LANES: tuple[Lane, ...] = ("interactive", "batch")
"""By the numbers of kiln_lane."""
GUIDANCE: tuple[GuidanceKind | None, ...] = (None, "json_schema", "json_object", "regex", "choices", "grammar")
"""By the numbers of kiln_guidance."""
FINISH: tuple[FinishReason | None, ...] = (None, "stop", "length", "cancelled", "timeout")
"""By the numbers of kiln_finish."""
ALL_TOKENS = 2**31 - 1
_NO_BYTES = b""

Lent = tuple[Any, tuple[object, ...]]
"""A C pointer, and what must live as long as somebody reads what it points to."""


class Converter:
    """Conversions over one cffi interface."""

    def __init__(self, ffi: Any) -> None:
        self._ffi = ffi

    def text(self, pointer: Any, field: str) -> str:
        """Raises KilnError for null and for bytes that are no UTF-8."""
        if pointer == self._ffi.NULL:
            raise KilnError(f"{field} is null; expected text")
        try:
            return self._ffi.string(pointer).decode()
        except UnicodeDecodeError as error:
            raise KilnError(f"{field} is not UTF-8 text ({error}); convert it") from error

    def tokens(self, pointer: Any, count: int, field: str = "tokens") -> list[int]:
        self._require_array(pointer, count, field)
        return self._ffi.unpack(pointer, count) if count else []

    def request_from_c(self, c: Any) -> Request:
        given = [c.prompt != self._ffi.NULL, c.tokens != self._ffi.NULL]
        if sum(given) != 1:
            found = "both prompt and tokens" if all(given) else "neither prompt nor tokens"
            raise KilnError(f"the request has {found}; set one of them")
        prompt = self.text(c.prompt, "prompt") if given[0] else tuple(self.tokens(c.tokens, c.token_count))
        return Request(
            prompt,
            self._sampling(c),
            lane=_by_number(LANES, c.lane, "lane"),
            timeout=_seconds(c.timeout),
            tenant=self.text(c.tenant, "tenant"),
        )

    def arrays_from_c(self, c: Any) -> tuple[dict[str, NDArray[Any]], Lane, float | None]:
        """Inputs by name, lane and timeout of an inference."""
        self._require_array(c.inputs, c.input_count, "inputs")
        arrays: dict[str, NDArray[Any]] = {}
        for number in range(c.input_count):
            name = self.text(c.inputs[number].name, f"the name of input {number}")
            if name in arrays:
                raise KilnError(f"two inputs are named {name}; name each of the model's inputs once")
            arrays[name] = self._array(c.inputs[number], name)
        return arrays, _by_number(LANES, c.lane, "lane"), _seconds(c.timeout)

    def c_from_text(self, text: str) -> Lent:
        memory = self._ffi.new("char[]", text.encode(errors="replace"))
        return memory, (memory,)

    def c_from_tokens(self, token_ids: Sequence[int]) -> Lent:
        memory = self._ffi.new("int32_t[]", list(token_ids) or 1)  # an address also for no tokens
        return memory, (memory,)

    def c_from_chunk(self, choice: int, chunk: TokenChunk) -> Lent:
        text = chunk.text.encode(errors="replace")
        tokens, text_memory = self._ffi.new("int32_t[]", chunk.token_ids), self._ffi.new("char[]", text)
        logprobs, owners = self._logprobs(chunk.logprobs)
        c = self._ffi.new("kiln_chunk *")
        c.choice, c.finish = choice, FINISH.index(chunk.finish_reason)
        c.tokens, c.token_count = tokens, len(chunk.token_ids)
        c.text, c.text_length = text_memory, len(text)
        c.logprobs, c.logprobs_count = logprobs, len(chunk.logprobs)
        return c, (c, tokens, text_memory, logprobs, owners)

    def c_from_outputs(self, outputs: dict[str, NDArray[Any]]) -> Lent:
        """Points into the arrays; those that are not dense in row-major order are copied."""
        ffi = self._ffi
        tensors, owners = ffi.new("kiln_tensor[]", len(outputs)), []
        for c, (name, given) in zip(tensors, outputs.items(), strict=True):
            array = np.ascontiguousarray(given).reshape(np.shape(given))  # the former makes scalars one-dimensional
            text, dtype = ffi.new("char[]", name.encode()), ffi.new("char[]", array.dtype.name.encode())
            shape, data = ffi.new("int64_t[]", array.shape or 1), ffi.from_buffer(array.reshape(-1).view(np.uint8))
            c.name, c.dtype, c.shape, c.rank = text, dtype, shape, array.ndim
            c.data, c.bytes = data, array.nbytes
            owners += [text, dtype, shape, data, array]
        c = ffi.new("kiln_outputs *", {"tensors": tensors, "count": len(outputs)})
        return c, (c, tensors, owners)

    def _sampling(self, c: Any) -> SamplingParams:
        self._require_array(c.logit_bias, c.logit_bias_count, "logit_bias")
        return SamplingParams(
            temperature=c.temperature,
            top_k=None if c.top_k == ALL_TOKENS else c.top_k,
            top_p=c.top_p,
            min_p=c.min_p,
            frequency_penalty=c.frequency_penalty,
            presence_penalty=c.presence_penalty,
            repetition_penalty=c.repetition_penalty,
            logit_bias={b.token: b.bias for b in (c.logit_bias[i] for i in range(c.logit_bias_count))},
            logprobs=c.top_logprobs if c.logprobs else None,
            seed=c.seed if c.seeded else None,
            max_tokens=c.max_tokens,
            stop=self._texts(c.stop, c.stop_count, "stop"),
            ignore_eos=bool(c.ignore_eos),
            n=c.n,
            guidance=self._guidance(c),
        )

    def _guidance(self, c: Any) -> Guidance | None:
        kind = _by_number(GUIDANCE, c.guidance, "guidance")
        if kind is None:
            return None
        if kind == "choices":
            return Guidance(kind, self._texts(c.choices, c.choice_count, "choices"))
        return Guidance(kind) if kind == "json_object" else Guidance(kind, self.text(c.guide, "guide"))

    def _texts(self, pointer: Any, count: int, field: str) -> tuple[str, ...]:
        self._require_array(pointer, count, field)
        return tuple(self.text(pointer[number], f"{field} {number}") for number in range(count))

    def _array(self, c: Any, name: str) -> NDArray[Any]:
        dtype = dtype_from_name(self.text(c.dtype, f"the dtype of {name}"), name)
        self._require_array(c.shape, c.rank, f"the shape of {name}")
        shape = [c.shape[axis] for axis in range(c.rank)]
        count = 1
        for dimension in shape:
            if dimension < 0:
                raise KilnError(f"{name} has the shape {shape}; expected dimensions of at least 0")
            count *= dimension
        if count * dtype.itemsize != c.bytes:
            raise KilnError(
                f"{name} has {c.bytes} bytes; its shape {shape} of {dtype.name} takes {count * dtype.itemsize}"
            )
        self._require_array(c.data, c.bytes, f"the data of {name}")
        data = bytes(self._ffi.buffer(c.data, c.bytes)) if c.bytes else _NO_BYTES
        return np.frombuffer(data, dtype).reshape(shape)

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> Lent:
        memory, owners = self._ffi.new("kiln_logprobs[]", len(logprobs)), []
        for c, position in zip(memory, logprobs, strict=True):
            top = self._ffi.new("kiln_token_logprob[]", list(position.top))
            c.chosen.token, c.chosen.logprob = position.token, position.logprob
            c.top, c.top_count = top, len(position.top)
            owners.append(top)
        return memory, tuple(owners)

    def _require_array(self, pointer: Any, count: int, field: str) -> None:
        if count and pointer == self._ffi.NULL:
            raise KilnError(f"{field} is null, but its count is {count}; give an address, or 0 items")


def dtype_from_name(name: str, tensor: str) -> np.dtype[Any]:
    """A fixed-size NumPy or ml_dtypes type of numbers or truth values."""
    try:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        dtype = np.dtype(object)
    if dtype.name != name or dtype.hasobject or dtype.kind not in "biufcV":
        raise KilnError(f"{tensor} has the dtype {name!r}; expected a NumPy name such as float32, int64 or bfloat16")
    return dtype


def timeout_from_c(seconds: float) -> float | None:
    """How long to wait: 0 is not at all, None as long as it takes."""
    if not seconds >= 0:
        raise KilnError(f"timeout is {seconds}; expected 0 or more seconds, or INFINITY")
    return None if seconds > threading.TIMEOUT_MAX else seconds


def _seconds(timeout: float) -> float | None:
    return None if timeout == float("inf") else timeout


def _by_number(names: tuple[Any, ...], number: int, field: str) -> Any:
    if not 0 <= number < len(names):
        raise KilnError(f"{field} is {number}; expected 0 to {len(names) - 1}, as kiln.h names them")
    return names[number]
