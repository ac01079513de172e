"""`Gate`: what a request must pass before anything reads it: the key, the size of its body, and the time it takes."""

from __future__ import annotations

import asyncio
import time
from hmac import compare_digest

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from helix.server.errors import ApiError

_OPEN_PATHS = ("/health",)
"""For probes, which carry no key."""


class Gate:
    """ASGI middleware. The key is compared in constant time; a body is counted as it comes, in `body_timeout_s`."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body_bytes: int, body_timeout_s: float) -> None:
        self._app = app
        self._expected = None if api_key is None else b"Bearer " + api_key.encode()
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self._expected is not None and scope["path"] not in _OPEN_PATHS:
            given = headers.get(b"authorization", b"")
            if not compare_digest(given, self._expected):
                error = ApiError(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY")
                error.code = "invalid_api_key"
                await error.response()(scope, receive, send)
                return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._max_body_bytes:
            await ApiError(413, self._too_large(), code="body_too_large").response()(scope, receive, send)
            return
        await self._app(scope, self._counting(receive), send)

    def _counting(self, receive: Receive) -> Receive:
        num_bytes = 0
        is_whole = False
        deadline = time.perf_counter() + self._body_timeout_s

        async def counted() -> Message:
            nonlocal num_bytes, is_whole
            try:
                # Once the body is there, the next message is that the client has left, however late that comes.
                message = await asyncio.wait_for(receive(), None if is_whole else deadline - time.perf_counter())
            except TimeoutError:
                raise HTTPException(408, "the body did not come in time") from None
            is_whole = is_whole or not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise HTTPException(413, self._too_large())
            return message

        return counted

    def _too_large(self) -> str:
        return f"the body is larger than the {self._max_body_bytes} bytes that this server takes"
