"""A chat service with OpenAI's API. Its model is a stand-in for a real one; see model.py.

    ingress run app_examples.chat.app:app

    curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' -d '
        {"model": "facts", "messages": [{"role": "user", "content": "Where does a plum grow?"}]}'

With `"stream": true` in the body the tokens arrive as server-sent events, and `curl -N` shows each
at once. `docs/how-to/chat.md` has the rest.
"""

import json
import math
import time
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

import ingress as serve
from app_examples.chat.model import LanguageModel
from app_examples.chat.schema import ChatRequest, ChatResponse, Choice, Message, Usage, error

Piece = tuple[str, str | None]  # a token, or nothing and the reason of the end

MODEL = "facts"
STARTED = int(time.time())

api = FastAPI(title="Chat")


@serve.deployment(
    max_ongoing_requests=8,
    max_queued_requests=16,
    backpressure_config={"status_code": 429, "retry_after_s": 1},
)
class Model:
    """The model. Eight answers advance in turn, token by token, in its one serial thread."""

    def __init__(self) -> None:
        self.model = LanguageModel()  # a real model loads its weights here

    @serve.method(execution="serial")
    def generate(
        self, prompt: str, max_tokens: int, temperature: float, seed: int | None
    ) -> Iterator[Piece]:
        """Yield at most `max_tokens` tokens, then the reason of the end."""
        tokens = self.model.generate(prompt, temperature, seed)
        for token in islice(tokens, max_tokens):
            yield token, None
        yield "", "length" if next(tokens, None) else "stop"


@serve.deployment(max_ongoing_requests=100)
@serve.ingress(api)
class Chat:
    """OpenAI's API. It reads the first token before it answers, so that a refusal has a status."""

    def __init__(self, model: serve.DeploymentHandle) -> None:
        self.generate = model.options(stream=True).generate

    @api.get("/v1/models")
    async def models(self) -> dict[str, Any]:
        stand_in = "a stand-in for a real model: it knows the colour, taste and place of ten plants"
        model = {"id": MODEL, "object": "model", "created": STARTED, "owned_by": "app_examples"}
        return {"object": "list", "data": [{**model, "description": stand_in}]}

    @api.post("/v1/chat/completions", response_model=ChatResponse)
    async def complete(self, body: ChatRequest) -> Response | ChatResponse:
        if body.model != MODEL:
            raise HTTPException(404, f"The model '{body.model}' does not exist")
        prompt = body.messages[-1].content
        tokens = self.generate.remote(prompt, body.max_tokens, body.temperature, body.seed)
        id_ = f"chatcmpl-{serve.get_request_context().request_id}"
        first = await anext(tokens)
        if body.stream:
            return StreamingResponse(
                self.events(id_, first, tokens), media_type="text/event-stream"
            )
        *said, (_, reason) = [first, *[piece async for piece in tokens]]
        message = Message(role="assistant", content="".join(token for token, _ in said))
        asked = sum(len(each.content.split()) for each in body.messages)
        usage = Usage(
            prompt_tokens=asked, completion_tokens=len(said), total_tokens=asked + len(said)
        )
        choice = Choice(message=message, finish_reason=reason)
        return ChatResponse(
            id=id_, created=int(time.time()), model=MODEL, choices=[choice], usage=usage
        )

    async def events(
        self, id_: str, first: Piece, following: AsyncIterator[Piece]
    ) -> AsyncIterator[str]:
        """Yield the chunks of an answer. If its client leaves, the generation is cancelled."""
        created = int(time.time())

        def chunk(delta: dict[str, str], reason: str | None = None) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            made = {"id": id_, "object": "chat.completion.chunk", "created": created}
            return f"data: {json.dumps({**made, 'model': MODEL, 'choices': [choice]})}\n\n"

        yield chunk({"role": "assistant", "content": first[0]}, first[1])
        async for token, reason in following:
            yield chunk({"content": token} if token else {}, reason)
        yield "data: [DONE]\n\n"


@api.exception_handler(serve.exceptions.BackPressureError)
async def too_many(request: Request, refusal: serve.exceptions.BackPressureError) -> Response:
    seconds = math.ceil(refusal.retry_after_s or 1)
    return error(refusal.status_code, str(refusal), {"retry-after": str(seconds)})


@api.exception_handler(StarletteHTTPException)
async def failed(request: Request, raised: StarletteHTTPException) -> Response:
    return error(raised.status_code, str(raised.detail), raised.headers)


@api.exception_handler(Exception)
async def broken(request: Request, raised: Exception) -> Response:
    return error(500, "The server had an error")


@api.exception_handler(RequestValidationError)
async def invalid(request: Request, raised: RequestValidationError) -> Response:
    first = raised.errors()[0]
    return error(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")


app = Chat.bind(Model.bind())
