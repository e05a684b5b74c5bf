"""Strict JSON bodies for FastAPI routes: `APIRouter(route_class=JsonRoute)`.

Python's own parser lets through what fails later: lone surrogates, NaN, nesting that exhausts the stack. pydantic's
refuses them, and so do we with status 400 and no part of the body in the message.
"""

from collections.abc import Callable, Coroutine
from typing import Any

import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute

from engines.server.errors import ApiError


class _JsonRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            try:
                self._json = pydantic_core.from_json(await self.body(), allow_inf_nan=False)
            except ValueError as error:
                raise ApiError(400, f"the body is not JSON in UTF-8: {error}", code="invalid_json") from error
        return self._json


class JsonRoute(APIRoute):
    """A route whose JSON body is parsed strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_strictly
