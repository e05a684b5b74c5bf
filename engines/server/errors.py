"""What a refused or failed request is answered: a status and one JSON object, as the API of the path words it.

OpenAI's paths give `{"error": {"message", "type", "param", "code"}}`, the KServe paths under /v2/ `{"error": message}`.

| status | when |
|---|---|
| 400 | the request cannot be run as it is: body, fields, prompt, schema |
| 401, 403 | no key or an unknown one; a key that may not use the lane |
| 404, 405 | no such path or model; not this method |
| 408, 413 | the body comes too slowly; is too large |
| 429 | too many requests at a time or waiting; with Retry-After |
| 500 | the engine's step or the server failed; the log has the traceback under the request's id |
| 503 | the server is shutting down, or the engine is being restarted; with Retry-After |
| 504 | the time limit passed before anything was generated |
"""

from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse

from engines.runtime.request import RequestError
from engines.runtime.scheduler import QueueFullError
from engines.server.served import EngineDiedError
from plugins.errors import KilnError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

RETRY_SOON = {"Retry-After": "1"}


class ApiError(HTTPException):
    """An answer other than success. `message` says what was found, what was expected and what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message = message
        self.param = param
        self.code = code

    @property
    def type(self) -> str:
        if self.status_code in _TYPES:
            return _TYPES[self.status_code]
        return "server_error" if self.status_code >= 500 else "invalid_request_error"

    def body(self, path: str) -> dict[str, Any]:
        """The JSON answer, as the API of this path words it."""
        if path.startswith("/v2"):
            return {"error": self.message}
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self, path: str) -> JSONResponse:
        return JSONResponse(self.body(path), self.status_code, headers=self.headers)


def api_error(error: Exception) -> ApiError | None:
    """The answer for what an engine raises; None for what is a bug."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers=RETRY_SOON)
    if isinstance(error, EngineDiedError):
        return ApiError(503, str(error), code="engine_died", headers=RETRY_SOON)
    if isinstance(error, RequestError):
        return ApiError(500, str(error), code="request_failed")
    if isinstance(error, TimeoutError):
        return timed_out(str(error))
    if isinstance(error, KilnError):
        return ApiError(400, str(error))
    return None


def timed_out(message: str) -> ApiError:
    """The time limit passed. Clients of OpenAI's would send it again at once; the header asks them not to."""
    return ApiError(504, message, code="timeout", headers={"x-should-retry": "false"})


def shutting_down() -> ApiError:
    return ApiError(
        503, "the server is shutting down; send the request to another one", code="shutting_down", headers=RETRY_SOON
    )
