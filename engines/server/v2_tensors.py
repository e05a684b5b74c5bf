"""Bodies of the Open Inference Protocol v2 to NumPy arrays and back, in JSON and with the binary tensor extension.

Pure: knows nothing of HTTP, engines or models. The sizes that a body names are compared with the bytes that it has
before anything is allocated, so a small request cannot ask for much memory.

Protocol: https://github.com/kserve/open-inference-protocol; the extension is Triton's `extension_binary_data.md`.
"""

import json
import math
from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Any

import ml_dtypes
import numpy as np
import pydantic_core
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engines.runtime.sequence import Lane
from plugins.errors import KilnError

DATATYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The protocol's datatypes; in bytes all are little-endian. BYTES is missing: no engine takes text."""
BINARY_ONLY = ("FP16", "BF16")
"""The protocol gives these no form in JSON."""
_NAMES = {dtype.name: datatype for datatype, dtype in DATATYPES.items()}
_JSON_TYPES: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}}
"""By the kind of the NumPy dtype."""
_MAX_RANK = 32
_MAX_DIMENSION = 2**31 - 1


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class InputParameters(_Strict):
    binary_data_size: int | None = Field(default=None, ge=0)
    """Bytes of this tensor after the JSON part."""


class InputTensor(_Strict):
    name: str
    shape: list[Annotated[int, Field(ge=1, le=_MAX_DIMENSION)]] = Field(max_length=_MAX_RANK)
    datatype: str
    parameters: InputParameters = InputParameters()
    data: list[Any] | None = None
    """Row-major: flat, or nested as the shape says; left out where the tensor comes as bytes."""


class OutputParameters(_Strict):
    binary_data: bool | None = None


class RequestedOutput(_Strict):
    name: str
    parameters: OutputParameters = OutputParameters()


class RequestParameters(_Strict):
    """What else a request may say; Kiln knows no other parameters, and ignoring one would be a surprise."""

    binary_data_output: bool = False
    """Whether outputs come as bytes unless they say otherwise."""
    lane: Lane | None = None
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds after which the request is given up."""


class InferHeader(_Strict):
    """The JSON part of a request."""

    id: str | None = None
    parameters: RequestParameters = RequestParameters()
    inputs: list[InputTensor] = Field(min_length=1)
    outputs: list[RequestedOutput] = []
    """Those wanted, in this order; none named means all."""

    def wants_binary(self, output: str) -> bool:
        """Whether this output is to come as bytes."""
        for requested in self.outputs:
            if requested.name == output and requested.parameters.binary_data is not None:
                return requested.parameters.binary_data
        return self.parameters.binary_data_output


def datatype_from_dtype(dtype: str) -> str:
    """The protocol's name of a NumPy dtype. Raises KilnError where there is none."""
    if dtype not in _NAMES:
        raise KilnError(f"the protocol has no datatype for {dtype}; it has {', '.join(DATATYPES)}")
    return _NAMES[dtype]


def request_from_body(body: bytes, header_length: int | None) -> tuple[InferHeader, dict[str, NDArray]]:
    """Decode a request into its JSON part and its inputs by name.

    Args:
        header_length: bytes of the JSON part, from `Inference-Header-Content-Length`; None: the body is JSON alone.

    Raises KilnError for a body that does not follow the protocol.
    """
    length = len(body) if header_length is None else header_length
    if not 0 <= length <= len(body):
        raise KilnError(f"Inference-Header-Content-Length is {length}; the body has {len(body)} bytes")
    header = _header_from_json(body[:length])
    _refuse_twice("input", [tensor.name for tensor in header.inputs])
    _refuse_twice("output", [output.name for output in header.outputs])
    return header, _arrays(header, memoryview(body)[length:])


def body_from_outputs(outputs: Mapping[str, NDArray], header: InferHeader, model: str) -> tuple[bytes, int | None]:
    """Encode a response; None for the header length means that it is JSON alone.

    Raises KilnError for an output that JSON cannot hold.
    """
    described: list[dict[str, Any]] = []
    raw: list[bytes] = []
    for name, array in outputs.items():
        datatype = datatype_from_dtype(array.dtype.name)
        tensor: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(array.shape)}
        if header.wants_binary(name):
            raw.append(np.ascontiguousarray(array).tobytes())
            tensor["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            check_fits_json(name, datatype)
            tensor["data"] = array.ravel().tolist()
        described.append(tensor)
    response = {"model_name": model, **({} if header.id is None else {"id": header.id}), "outputs": described}
    try:
        text = json.dumps(response, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as error:
        raise KilnError(
            "an output holds NaN or infinite values, which JSON cannot express; check the inputs, or ask for the "
            'output as bytes: "parameters": {"binary_data": true}'
        ) from error
    return b"".join([text, *raw]), len(text) if raw else None


def check_fits_json(output: str, datatype: str) -> None:
    """Raise KilnError where the protocol has no JSON form of a datatype."""
    if datatype in BINARY_ONLY:
        raise KilnError(
            f"output {output} is {datatype}, which the protocol cannot express in JSON; ask for it as bytes: "
            '"parameters": {"binary_data": true}'
        )


def _header_from_json(text: bytes) -> InferHeader:
    try:
        return InferHeader.model_validate(pydantic_core.from_json(text, allow_inf_nan=False))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise KilnError(f"{where:.200}: {first['msg']}; see the Open Inference Protocol's inference request") from error
    except ValueError as error:
        raise KilnError(
            f"the JSON part is not JSON in UTF-8: {error}; where bytes follow it, Inference-Header-Content-Length "
            "says how long it is"
        ) from error


def _refuse_twice(kind: str, names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise KilnError(f"{kind} {name!r:.80} is there twice; name every {kind} once")
        seen.add(name)


def _arrays(header: InferHeader, raw: memoryview) -> dict[str, NDArray]:
    arrays = {}
    start = 0
    for tensor in header.inputs:
        if tensor.datatype not in DATATYPES:
            hint = ": turn text into token ids first" if tensor.datatype == "BYTES" else ""
            raise KilnError(
                f"input {tensor.name!r:.80} has datatype {tensor.datatype!r:.20}; engines take "
                f"{', '.join(DATATYPES)}{hint}"
            )
        size = tensor.parameters.binary_data_size
        if (size is None) == (tensor.data is None):
            raise KilnError(
                f"input {tensor.name!r:.80} has {'neither' if size is None else 'both'} data and binary_data_size; "
                "give its values in one of the two ways"
            )
        if size is None:
            arrays[tensor.name] = _array_from_json(tensor)
        else:
            arrays[tensor.name] = _array_from_bytes(tensor, raw[start : start + size], size)
            start += size
    if start != len(raw):
        raise KilnError(
            f"{len(raw)} bytes follow the JSON part, the inputs' binary_data_size add up to {start}; make them agree "
            "with each other and with Inference-Header-Content-Length"
        )
    return arrays


def _array_from_bytes(tensor: InputTensor, raw: memoryview, size: int) -> NDArray:
    dtype = DATATYPES[tensor.datatype].newbyteorder("<") if tensor.datatype != "BF16" else DATATYPES["BF16"]
    needed = math.prod(tensor.shape) * dtype.itemsize
    if size != needed or len(raw) != size:
        raise KilnError(
            f"input {tensor.name!r:.80} of shape {tensor.shape} and datatype {tensor.datatype} takes {needed} bytes; "
            f"its binary_data_size is {size}, the body has {len(raw)} of them"
        )
    if tensor.datatype == "BOOL":
        return (np.frombuffer(raw, np.uint8) != 0).reshape(tensor.shape)
    # A copy, because the bytes of the body need not be aligned.
    return np.frombuffer(raw, dtype).copy().reshape(tensor.shape)


def _array_from_json(tensor: InputTensor) -> NDArray:
    if tensor.datatype in BINARY_ONLY:
        raise KilnError(
            f"input {tensor.name!r:.80} is {tensor.datatype}, which the protocol cannot express in JSON; send it as "
            "bytes, with binary_data_size"
        )
    values = _flattened(tensor)
    dtype = DATATYPES[tensor.datatype]
    wrong = set(map(type, values)) - _JSON_TYPES[dtype.kind]
    if wrong:
        names = " and ".join(sorted(kind.__name__ for kind in wrong))
        raise KilnError(f"input {tensor.name!r:.80} has datatype {tensor.datatype}, but there are {names} in its data")
    try:
        return np.array(values, dtype).reshape(tensor.shape)
    except OverflowError as error:
        raise KilnError(f"input {tensor.name!r:.80} has a value beyond the range of {tensor.datatype}") from error


def _flattened(tensor: InputTensor) -> list[Any]:
    """The values in row-major order; as many as the shape says."""
    values = tensor.data or []
    if tensor.shape and values and type(values[0]) is list:
        for axis, length in enumerate(tensor.shape):
            if axis == 0:
                fits = len(values) == length
            else:
                fits = all(type(row) is list and len(row) == length for row in values)
                values = list(chain.from_iterable(values)) if fits else values
            if not fits:
                raise KilnError(
                    f"input {tensor.name!r:.80} has nested data that do not follow its shape {tensor.shape} in axis "
                    f"{axis}; nest them as the shape says, or give them flat"
                )
    if len(values) != math.prod(tensor.shape):
        raise KilnError(
            f"input {tensor.name!r:.80} has {len(values)} values, its shape {tensor.shape} holds "
            f"{math.prod(tensor.shape)}; make them agree"
        )
    return values
