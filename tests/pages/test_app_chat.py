"""`app_examples/chat`: OpenAI's API, streams, refusals, and docs/how-to/chat.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import ingress as serve
from app_examples.chat import app as example
from app_examples.chat.model import LanguageModel, corpus
from tests.conformance.observe import Gate, online
from tests.how_to import check_page
from tests.servers import PATIENCE_S, bind, wait_until

PATH = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "Where does a plum grow?"}
BODY: dict[str, Any] = {"model": "facts", "messages": [QUESTION], "temperature": 0}


def events(response: Any) -> list[str]:
    """Return the data of each server-sent event."""
    return [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with online(example.app) as served:
        yield str(served.client.base_url)


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
        yield client


def test_an_answer_has_openais_shape(client: httpx.Client) -> None:
    answer = client.post(PATH, json=BODY).json()

    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "You find a plum on a tree."}
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    assert answer["object"] == "chat.completion"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}


def test_the_model_has_learned_every_fact_of_its_text() -> None:
    model = LanguageModel()

    answers = ["".join(model.generate(question, 0, None)) for question, _ in corpus()]

    assert answers == [answer.replace(" .", ".") for _, answer in corpus()]


def test_a_seed_makes_a_random_answer_the_same_again(client: httpx.Client) -> None:
    said = set()
    for seed in (1, 1, 2, 3, 4, 5, 6, 7):
        body = {**BODY, "temperature": 2, "seed": seed, "max_tokens": 20}
        answer = client.post(PATH, json=body).json()
        said.add((seed, answer["choices"][0]["message"]["content"]))

    assert len(said) == 7
    assert len({content for _, content in said}) > 1


def test_max_tokens_ends_an_answer_early_and_says_so(client: httpx.Client) -> None:
    (choice,) = client.post(PATH, json={**BODY, "max_tokens": 2}).json()["choices"]

    assert (choice["message"]["content"], choice["finish_reason"]) == ("You find", "length")


def test_a_stream_has_a_chunk_for_each_token_a_reason_and_an_end(client: httpx.Client) -> None:
    response = client.post(PATH, json={**BODY, "stream": True})

    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response)
    assert done == "[DONE]"
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": "You"}
    said = [each["delta"].get("content", "") for each in choices]
    assert said == ["You", " find", " a", " plum", " on", " a", " tree", ".", ""]
    assert [each["finish_reason"] for each in choices] == [None] * 8 + ["stop"]


def test_the_models_are_listed_and_the_one_says_that_it_is_a_stand_in(client: httpx.Client) -> None:
    (model,) = client.get("/v1/models").json()["data"]

    assert (model["id"], model["object"]) == ("facts", "model")
    assert "stand-in for a real model" in model["description"]


@pytest.mark.parametrize(
    ("path", "change", "status", "kind", "message"),
    [
        (PATH, {"model": "gpt"}, 404, "not_found_error", "The model 'gpt' does not exist"),
        (PATH, {"messages": []}, 400, "invalid_request_error", "body.messages: List should"),
        (PATH, {"temperature": 3}, 400, "invalid_request_error", "body.temperature: Input"),
        ("/v1/other", {}, 404, "not_found_error", "Not Found"),
    ],
    ids=["unknown model", "no messages", "too hot", "unknown path"],
)
def test_an_error_has_openais_shape(
    path: str, change: dict[str, Any], status: int, kind: str, message: str, client: httpx.Client
) -> None:
    response = client.post(path, json={**BODY, **change})

    assert response.status_code == status
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == (kind, None, None)
    assert error["message"].startswith(message)


def test_openais_client_reads_answers_streams_and_errors(url: str) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0) as client:
        answer = client.chat.completions.create(**BODY)
        assert answer.choices[0].message.content == "You find a plum on a tree."
        chunks = client.chat.completions.create(**BODY, stream=True)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert said == "You find a plum on a tree."
        assert [model.id for model in client.models.list()] == ["facts"]
        with pytest.raises(openai.NotFoundError, match="The model 'gpt' does not exist"):
            client.chat.completions.create(**{**BODY, "model": "gpt"})


class Talk:
    """A model that says a word, and then the same as often as the gate lets it pass."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.closed = 0

    def generate(self, *_: object) -> Iterator[str]:
        try:
            yield "word"
            self.gate.wait()
            yield " word"
        finally:
            self.closed += 1


def gated(talk: Talk) -> serve.Application:
    """Return the application with another language model in a lane, whose calls may wait."""

    class Model(example.Model.func_or_class):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.model = talk

        @serve.method(execution="threadpool")
        def generate(self, *arguments: Any) -> Iterator[example.Piece]:
            yield from super().generate(*arguments)

    deployment: Any = example.Model
    return bind(example.Chat, bind(replace(deployment, func_or_class=Model)))


def test_the_first_token_arrives_before_the_second_is_made() -> None:
    gate = Gate()
    with online(gated(Talk(gate))) as it:
        with it.client.stream("POST", PATH, json={**BODY, "stream": True}) as response:
            lines = response.iter_lines()
            assert '"content": "word"' in next(lines)
            gate.open()
            assert sum('"content": " word"' in line for line in lines) == 1


def test_a_client_that_leaves_ends_the_generation_of_its_answer() -> None:
    gate = Gate()
    talk = Talk(gate)
    with online(gated(talk)) as it:
        with it.client.stream("POST", PATH, json={**BODY, "stream": True}) as response:
            next(response.iter_lines())
            gate.wait_for(1)
        gate.open()
        wait_until(lambda: talk.closed == 1)
        wait_until(lambda: not any(each.ongoing for each in it.status("Model").replicas))


def test_requests_beyond_the_queue_are_told_to_come_again() -> None:
    gate = Gate()
    with online(gated(Talk(gate))) as it, ThreadPoolExecutor(24) as pool:
        waiting = [pool.submit(it.client.post, PATH, json=BODY) for _ in range(8 + 16)]
        wait_until(lambda: it.status("Model").queued == 16)
        refused = [it.client.post(PATH, json={**BODY, "stream": each}) for each in (True, False)]
        gate.open()
        answers: list[Any] = [each.result() for each in waiting]
        assert {each.status_code for each in answers} == {200}

    for response in refused:
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert response.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.thorough
def test_its_page_shows_its_code_and_its_answers(tmp_path: Path) -> None:
    check_page("chat", tmp_path)
