"""Errors as OpenAI clients know them: {"error": {"message", "type", "param", "code"}} and an HTTP status."""

from __future__ import annotations

import math

import msgspec
from aiohttp import web

from transfer.errors import PhaseplaneError
from transfer.said import Said

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 405: "invalid_request_error",
    408: "timeout_error", 409: "conflict_error", 413: "invalid_request_error", 429: "rate_limit_error",
    503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class ApiError(PhaseplaneError):
    """What a client is told. retry_after_s: seconds, sent rounded up as Retry-After; said: the message for screens."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        retry_after_s: float | None = None, said: Said | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.said = said
        self.status, self.param, self.code, self.retry_after_s = status, param, code, retry_after_s

    def body(self) -> bytes:
        """The JSON."""
        kind = _TYPES.get(self.status, "server_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error if self.said is None else error | {"said": self.said}})

    def response(self, request_id: str | None = None) -> web.Response:
        """The HTTP answer, before any byte of another one was sent."""
        headers = {"X-Request-Id": request_id} if request_id else {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        response = web.Response(status=self.status, body=self.body(), content_type="application/json", headers=headers)
        if self.status == 408:
            response.force_close()  # what is still to come of the request would be taken for another one
        return response


def told(status: int, said: Said, *, code: str | None = None, retry_after_s: float | None = None) -> ApiError:
    """What screens can say in their language, too."""
    return ApiError(status, str(said), code=code, retry_after_s=retry_after_s, said=said)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)
