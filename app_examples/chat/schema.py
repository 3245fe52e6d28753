"""Requests, answers and errors of the chat service, as OpenAI's API has them."""

from collections.abc import Mapping
from typing import Literal

from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field


class Message(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str


class ChatRequest(BaseModel):
    model: str
    messages: list[Message] = Field(min_length=1)
    stream: bool = False
    max_tokens: int = Field(64, ge=1, le=4096)
    temperature: float = Field(1, ge=0, le=2)
    seed: int | None = None


class Choice(BaseModel):
    index: int = 0
    message: Message
    finish_reason: Literal["stop", "length"]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatResponse(BaseModel):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


def error(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return an answer in the shape of OpenAI's errors."""
    kinds = {404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return JSONResponse(body, status, headers)
