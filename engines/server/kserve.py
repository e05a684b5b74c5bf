"""KServe's Open Inference Protocol v2: `/v2/...`, for models without a KV cache.

Tensors come and go as JSON or as bytes (`engines.server.v2_tensors`). Requests run one by one through the engine, which
batches those that fit together. A request's parameters are `lane`, `timeout` (seconds) and `binary_data_output`; others
are refused, because ignoring what a client relies on would be wrong quietly.

Protocol: https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
"""

import asyncio
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from numpy.typing import NDArray
from pydantic import BaseModel

from engines.runtime.info import EngineInfo, TensorInfo
from engines.server.context import Calling, Context, Record
from engines.server.errors import ApiError
from engines.server.v2_tensors import (
    InferHeader,
    body_from_outputs,
    check_fits_json,
    datatype_from_dtype,
    request_from_body,
)

HEADER_LENGTH = "Inference-Header-Content-Length"


def _inlined(schema: Any, definitions: dict[str, Any] | None = None) -> Any:
    """A JSON Schema without references, which would mean other places in the OpenAPI document around it."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    known = definitions or schema.get("$defs", {})
    target = known[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else {}
    kept = {key: value for key, value in {**target, **schema}.items() if key not in ("$ref", "$defs")}
    return {key: _inlined(value, known) for key, value in kept.items()}


_INFER_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": _inlined(InferHeader.model_json_schema())},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    },
    "parameters": [
        {
            "name": HEADER_LENGTH,
            "in": "header",
            "required": False,
            "description": "Bytes of the JSON part, where the bytes of tensors follow it",
            "schema": {"type": "integer", "minimum": 0},
        }
    ],
}


class V2Error(BaseModel):
    """What refused and failed requests under /v2 are answered."""

    error: str


_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": V2Error, "description": "The request is refused."},
    "5XX": {"model": V2Error, "description": "The server is ending, an engine is down, or the request failed."},
}


def kserve_router() -> APIRouter:
    """Routes under /v2."""
    router = APIRouter(prefix="/v2", tags=["KServe"], responses=_ERRORS)
    router.add_api_route("", _server, methods=["GET"])
    router.add_api_route("/health/live", _live, methods=["GET"])
    router.add_api_route("/health/ready", _ready, methods=["GET"])
    router.add_api_route("/models/{name}", _model, methods=["GET"])
    router.add_api_route("/models/{name}/ready", _model_ready, methods=["GET"])
    router.add_api_route("/models/{name}/infer", _infer, methods=["POST"], openapi_extra=_INFER_BODY)
    return router


async def _server() -> dict[str, Any]:
    return {"name": "kiln", "version": version("kiln-engine"), "extensions": ["binary_tensor_data"]}


async def _live() -> dict[str, bool]:
    return {"live": True}


async def _ready(context: Context) -> JSONResponse:
    return JSONResponse({"ready": context.ready}, 200 if context.ready else 503)


async def _model(name: str, context: Context) -> dict[str, Any]:
    info = context.engine(name).info
    return {
        "name": name,
        "platform": "kiln_bundle",
        "inputs": [_described(tensor) for tensor in info.inputs],
        "outputs": [_described(tensor) for tensor in info.outputs],
    }


async def _model_ready(name: str, context: Context) -> JSONResponse:
    ready = context.engine(name).ready and not context.draining
    return JSONResponse({"name": name, "ready": ready}, 200 if ready else 503)


async def _infer(name: str, request: Request, context: Context, caller: Calling, record: Record) -> Response:
    engine = context.engine(name)
    record.model = name
    if engine.info.kind == "decoder":
        raise ApiError(400, f"{name} generates text; use /v1/completions or /v1/chat/completions")
    body = await request.body()
    header, inputs = await asyncio.to_thread(request_from_body, body, _header_length(request))
    _check(engine.info, header, inputs)
    most = context.config.request_timeout
    outputs = await engine.infer(
        inputs,
        lane=context.lane(caller, header.parameters.lane),
        timeout=min(header.parameters.timeout or most, most),
    )
    wanted = {output.name: outputs[output.name] for output in header.outputs} or outputs
    answer, length = await asyncio.to_thread(body_from_outputs, wanted, header, name)
    if length is None:
        return Response(answer, media_type="application/json")
    return Response(answer, media_type="application/octet-stream", headers={HEADER_LENGTH: str(length)})


def _header_length(request: Request) -> int | None:
    text = request.headers.get(HEADER_LENGTH)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise ApiError(400, f"{HEADER_LENGTH} is {text!r:.40}; expected the length of the JSON part in bytes")
    return int(text)


def _check(info: EngineInfo, header: InferHeader, inputs: Mapping[str, NDArray]) -> None:
    """Refuse what could not be answered, before it runs; names and shapes of inputs are the engine's to check."""
    for tensor in info.inputs:
        found = inputs.get(tensor.name)
        if found is not None and found.dtype.name != tensor.dtype:
            raise ApiError(
                400,
                f"input {tensor.name} has datatype {datatype_from_dtype(found.dtype.name)}; "
                f"{info.name} expects {datatype_from_dtype(tensor.dtype)}",
            )
    outputs = {tensor.name: tensor for tensor in info.outputs}
    for requested in header.outputs:
        if requested.name not in outputs:
            raise ApiError(400, f"{info.name} has no output {requested.name!r:.80}; it has {', '.join(outputs)}")
    for name in [requested.name for requested in header.outputs] or outputs:
        if not header.wants_binary(name):
            check_fits_json(name, datatype_from_dtype(outputs[name].dtype))


def _described(tensor: TensorInfo) -> dict[str, Any]:
    shape = [size if isinstance(size, int) else -1 for size in tensor.shape]
    return {"name": tensor.name, "datatype": datatype_from_dtype(tensor.dtype), "shape": shape}
