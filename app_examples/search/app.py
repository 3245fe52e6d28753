"""A search for documents by meaning: embeddings in batches that tune themselves.

    ingress run app_examples.search.app:app

    curl 'http://127.0.0.1:8000/search?q=oil+for+the+bicycle&limit=1'
        {"hits":[{"title":"bicycle chain","score":1.0}]}

`docs/how-to/search.md` has the rest.
"""

import asyncio
from typing import Annotated

import numpy as np
from fastapi import FastAPI, Query
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer

import ingress as serve
from app_examples.search.documents import DOCUMENTS

Vector = NDArray[np.float64]

api = FastAPI(title="Search")


class Document(BaseModel):
    title: str = Field(min_length=1, max_length=200)
    text: str = Field(min_length=1, max_length=10_000)


class Hit(BaseModel):
    title: str
    score: float


class Hits(BaseModel):
    hits: list[Hit]


@serve.deployment(max_ongoing_requests=256, max_queued_requests=1024)
class Embedder:
    """Turns texts into vectors of length 1. A real model takes the place of the pipeline."""

    def __init__(self) -> None:
        words = TfidfVectorizer(stop_words="english", sublinear_tf=True)
        self.model = make_pipeline(words, TruncatedSVD(16, random_state=0), Normalizer())
        self.model.fit([f"{title}. {text}" for title, text in DOCUMENTS.items()])

    @serve.batch(target_latency_ms=50)
    def embed(self, texts: list[str]) -> list[Vector]:
        return list(self.model.transform(texts))


@serve.deployment
@serve.ingress(api)
class Search:
    """Keeps titles and vectors in memory, so there is one replica."""

    async def __init__(self, embedder: serve.DeploymentHandle) -> None:  # type: ignore[misc]
        self.embed = embedder.embed
        self.titles: list[str] = []
        self.vectors: Vector = np.empty((0, 16))
        await self.add([Document(title=title, text=text) for title, text in DOCUMENTS.items()])

    @api.post("/documents", status_code=201)
    async def add(self, documents: Annotated[list[Document], Field(max_length=200)]) -> int:
        """Add documents, all at once. Return the number of documents."""
        texts = [f"{each.title}. {each.text}" for each in documents]
        added = await asyncio.gather(*(self.embed.remote(text) for text in texts))
        self.titles += [each.title for each in documents]
        self.vectors = np.vstack([self.vectors, *added])
        return len(self.titles)

    @api.get("/search")
    async def search(
        self,
        q: Annotated[str, Query(min_length=1, max_length=1000)],
        limit: Annotated[int, Query(ge=1, le=50)] = 3,
    ) -> Hits:
        """Return the titles of the nearest documents, with the cosine of the angle to each."""
        vector = await self.embed.remote(q)
        scores = (self.vectors @ vector).round(3)
        best = [i for i in np.argsort(-scores)[:limit] if scores[i] > 0]
        return Hits(hits=[Hit(title=self.titles[i], score=scores[i]) for i in best])


app = Search.bind(Embedder.bind())
