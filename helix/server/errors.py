"""`ApiError`: every error that a client gets to see, in OpenAI's form, and nothing of the machine in it."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse

_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_MAX_MESSAGE = 2000


class ErrorFields(BaseModel):
    """What an error says."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer other than 200, for the schema."""

    error: ErrorFields


class ApiError(Exception):
    """An answer other than 200.

    `param` names the field that is wrong, `code` is for programs to compare, `retry_after_s` becomes a header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON of the answer; half surrogates of a client's text are written out, as UTF-8 cannot hold them."""
        message = self.message[:_MAX_MESSAGE].encode(errors="backslashreplace").decode()
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400. Without `param` the field is taken from messages that begin with ``field=value``."""
    named = re.match(r"([a-z_]+)=", message)
    return ApiError(400, message, param=param or (named[1] if named else None), code="invalid_value")
