"""The HTTP routes. A handler turns a body into generations at the desk, and their pieces into an answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from helix.config import ServerConfig
from helix.engine.engine import Engine, Prompt
from helix.engine.generation import Generation
from helix.errors import HelixError, RankFailure, RequestError
from helix.server.answers import Answer, Chat, Completion, Json
from helix.server.desk import Call, Desk
from helix.server.errors import ApiError, ErrorBody, bad_request
from helix.server.gate import Gate
from helix.server.metrics import Metrics
from helix.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    explain,
)

T = TypeVar("T")

_BODY_S = 60.0
"""How long a body may take to come, so that connections which send nothing are not held for ever."""
_FLUSH_S = 5.0
"""How long after its deadline a stream may still try to hand its last chunks to a client that does not read."""


class Service:
    """What the routes share. `engine` is None until the model is loaded."""

    def __init__(self, config: ServerConfig, model_name: str, desk: Desk, metrics: Metrics) -> None:
        self.config = config
        self.model_name = model_name
        self.desk = desk
        self.metrics = metrics
        self.engine: Engine | None = None
        self.started = int(time.time())
        # Long prompts take seconds to encode: not on the event loop, and one at a time, beside the engine's own work.
        self._encoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="helix-encode")

    def ready_engine(self) -> Engine:
        """The engine; raises `ApiError` 503 before it is loaded."""
        if self.engine is None:
            raise ApiError(503, "the model is still being loaded; try again later", code="loading", retry_after_s=5)
        return self.engine

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"there is no model {name[:200]!r} here, only {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def encoded(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread for tokenizers."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work)

    async def open(self, body: CompletionRequest | ChatRequest, arrived: float) -> Call:
        """Encode and check the prompts of `body` and hand them to the engine."""
        engine = self.ready_engine()
        self.check_model(body.model)
        body.check()
        prompts = body.prompts()
        count = len(prompts) * body.num_choices
        self.desk.admit(count)
        try:
            generations = await self.encoded(lambda: _prepare(engine, body, prompts))
            return self.desk.submit(generations, arrived)
        except BaseException:
            self.desk.release(count)
            raise

    async def answer(self, body: CompletionRequest | ChatRequest, request: Request) -> Response:
        """The whole answer or a stream of it; a client that goes away at any moment ends its generations."""
        arrived = time.perf_counter()
        if not body.stream:
            answered = await _unless_gone(request.receive, self._whole(body, arrived))
            return Response(status_code=499) if answered is None else JSONResponse(answered)
        call = await self.open(body, arrived)
        return EventStream(self._events(body, call), call)

    async def _whole(self, body: CompletionRequest | ChatRequest, arrived: float) -> Json:
        call = await self.open(body, arrived)
        try:
            answer = self._shape(body, call)
            async for index, piece in call.pieces():
                answer.choices[index].add(piece)
            return answer.whole()
        finally:
            call.close()

    async def _events(self, body: CompletionRequest | ChatRequest, call: Call) -> AsyncIterator[str]:
        """Server-sent events; an error after the first of them comes as one more, which clients raise."""
        answer = self._shape(body, call)
        extra: Json = {"usage": None} if body.include_usage else {}
        for opening in answer.opening():
            yield _event(opening | extra)
        try:
            async for index, piece in call.pieces():
                chunk = answer.chunk(index, piece)
                if chunk is not None:
                    yield _event(chunk | extra)
        except ApiError as error:
            yield _event(error.body())
            return
        if body.include_usage:
            yield _event(answer.usage_chunk())
        yield "data: [DONE]\n\n"

    def _shape(self, body: CompletionRequest | ChatRequest, call: Call) -> Answer:
        generations = [ticket.generation for ticket in call.tickets]
        common = (self.ready_engine().tokenizer, self.model_name, generations, body.num_choices)
        if isinstance(body, ChatRequest):
            return Chat(*common)
        return Completion(*common, prompts=body.prompts(), echo=bool(body.echo))


class EventStream(StreamingResponse):
    """A stream of events that closes its call on every way out, also before the first event."""

    def __init__(self, events: AsyncIterator[str], call: Call) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._call = call

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        limit_s = self._call.deadline + _FLUSH_S - time.perf_counter()
        try:
            async with asyncio.timeout(limit_s):
                await _unless_gone(receive, self.stream_response(send))
        except TimeoutError:
            return  # the client does not read; nothing more can be said to it
        finally:
            self._call.close()


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None where the client went away first, which cancels it."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _prepare(engine: Engine, body: CompletionRequest | ChatRequest, prompts: Sequence[Prompt]) -> list[Generation]:
    """The generations of one request: every prompt, n times each."""
    tools = body.tools_for_template if isinstance(body, ChatRequest) else None
    generations = []
    for prompt in prompts:
        ids = engine.encode(prompt, tools)
        for index in range(body.num_choices):
            params = body.sampling(index, len(ids), engine.max_context)
            generations.append(engine.prepare(ids, params, priority=body.priority or 0))
    return generations


def _event(content: Json) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


def make_app(service: Service) -> FastAPI:
    """The ASGI application."""
    responses: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}
    app = FastAPI(title="Helix", docs_url=None, redoc_url=None, responses=responses)
    config = service.config
    app.add_middleware(
        Gate,
        api_key=config.api_key,
        max_body_bytes=config.max_body_bytes,
        body_timeout_s=min(config.request_timeout_s, _BODY_S),
    )
    _add_errors(app)
    _add_generation(app, service)
    _add_state(app, service)
    _add_tokens(app, service)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    forms: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}

    @app.post("/v1/completions", response_model=None, responses=forms)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.answer(body, request)

    @app.post("/v1/chat/completions", response_model=None, responses=forms)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await service.answer(body, request)


def _add_state(app: FastAPI, service: Service) -> None:
    card = {"id": service.model_name, "object": "model", "created": service.started, "owned_by": "helix"}

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        service.check_model(name)
        return card

    @app.get("/health", response_model=None, responses={503: {"description": "not ready"}})
    async def health() -> Response:
        engine = service.engine
        state = "failed" if engine is not None and engine.failure is not None else service.desk.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Json:
        service.check_model(body.model)
        engine, prompt = service.ready_engine(), body.the_prompt()
        ids = await service.encoded(lambda: engine.encode(prompt, body.tools))
        return {"tokens": ids, "count": len(ids), "max_model_len": engine.max_context}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Json:
        service.check_model(body.model)
        engine, tokenizer = service.ready_engine(), service.ready_engine().tokenizer
        if tokenizer is None:
            raise bad_request("tokens cannot be turned into text: the checkpoint has no tokenizer", "tokens")
        return {"prompt": await service.encoded(lambda: str(tokenizer.decode(engine.encode(body.tokens))))}


def _add_errors(app: FastAPI) -> None:
    """Every error leaves in OpenAI's form; what is not meant for clients leaves as one sentence."""

    def handle(kind: type[Exception], to_api: Callable[[Any], ApiError]) -> None:
        async def handler(_request: Request, error: Exception) -> Response:
            return to_api(error).response()

        app.add_exception_handler(kind, handler)

    handle(ApiError, lambda error: error)
    handle(RequestError, lambda error: bad_request(str(error)))
    handle(RankFailure, lambda _: ApiError(503, "the engine has failed", code="failed", retry_after_s=5))
    handle(HelixError, lambda _: ApiError(500, "the request failed", code="internal_error"))
    handle(RequestValidationError, lambda error: explain(error.errors()))
    handle(HTTPException, lambda error: ApiError(error.status_code, _http_message(error)))
    handle(Exception, lambda _: ApiError(500, "the server made an error; its log says more", code="internal_error"))


def _http_message(error: HTTPException) -> str:
    return {404: "there is no such path", 405: "this path takes another method"}.get(
        error.status_code, str(error.detail)
    )
