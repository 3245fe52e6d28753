"""`app_examples/search`: scores, uploads and batches, and docs/how-to/search.md."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ingress as serve
from tests.conformance.observe import Gate, Served, online
from tests.how_to import check_page
from tests.servers import bind, wait_until

pytest.importorskip("sklearn", reason="needs the extra `apps`")

from app_examples.search import app as example
from app_examples.search.documents import DOCUMENTS


@pytest.fixture
def it() -> Iterator[Served]:
    with online(example.app) as served:
        yield served


def titles(it: Served, query: str) -> list[str]:
    return [hit["title"] for hit in it.get(f"/search?q={query}").json()["hits"]]


@pytest.mark.parametrize(
    ("query", "title"),
    [
        ("how do I repair a hole in the tube", "flat tyre"),
        ("When do I sow tomatoes?", "tomatoes"),
        ("the brightest planet", "planets"),
        ("dough", "bread"),
    ],
)
def test_the_nearest_document_comes_first(query: str, title: str, it: Served) -> None:
    hits = it.get(f"/search?q={query}&limit=24").json()["hits"]
    scores = [hit["score"] for hit in hits]

    assert hits[0]["title"] == title
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score <= 1 for score in scores)


def test_documents_that_a_client_adds_are_found(it: Served) -> None:
    assert "honey cake" not in titles(it, "bake with honey")
    added = [
        {"title": "honey cake", "text": "Bake flour and honey."},
        {"title": "sundial", "text": "The sun throws a shadow."},
    ]

    response = it.client.post("/documents", json=added)

    assert (response.status_code, response.json()) == (201, len(DOCUMENTS) + 2)
    assert "honey cake" in titles(it, "bake with honey")
    assert "sundial" in titles(it, "sun")


def test_a_query_of_unknown_words_finds_nothing_and_an_empty_one_is_refused(it: Served) -> None:
    assert titles(it, "xylophone") == []
    assert it.get("/search?q=").status_code == 422
    assert it.client.post("/documents", json=[{"title": "", "text": "a"}]).status_code == 422


def test_queries_that_arrive_during_a_batch_are_embedded_together_in_a_thread() -> None:
    gate = Gate()
    batches: list[int] = []
    threads: set[str] = set()

    class Embedder(example.Embedder.func_or_class):  # type: ignore[misc, name-defined]
        @serve.batch(target_latency_ms=50)
        def embed(self, texts: list[str]) -> Any:
            if "gate" in texts[0]:
                gate.wait()
            batches.append(len(texts))
            threads.add(threading.current_thread().name)
            return list(self.model.transform(texts))

    deployment: Any = example.Embedder
    app = bind(example.Search, bind(replace(deployment, func_or_class=Embedder)))
    with online(app) as it:
        it.get("/search?q=warm")
        [first] = it.send("/search?q=gate")
        gate.wait_for(1)
        batches.clear()
        others = it.send("/search?q=moon", 12)
        wait_until(lambda: it.ongoing() == 13)
        gate.open()
        answers = [each.result() for each in (first, *others)]

    assert {answer.status_code for answer in answers} == {200}
    assert sum(batches) == 13
    assert len(batches) < 13
    assert all("worker" in name for name in threads)


@pytest.mark.thorough
def test_its_page_shows_its_code_and_its_answers(tmp_path: Path) -> None:
    check_page("search", tmp_path)
