"""Several deployments behind one FastAPI app, called through handles.

    ingress run app_examples.composition:app

    curl 'http://127.0.0.1:8000/tokens?text=A+fine+day'
    ["a","fine","day"]
    curl 'http://127.0.0.1:8000/analyse?text=A+fine+day.+Then+it+rained.'
    {"score":1,"summary":"A fine day."}

`/tokens` awaits one call. `/analyse` makes three: it passes the tokens to the model without an
`await`, and the model gets them when they are ready; the summarizer runs at the same time.
"""

import asyncio

from fastapi import FastAPI

import ingress as serve

api = FastAPI(title="Composition")


@serve.deployment
class Tokenizer:
    async def __call__(self, text: str) -> list[str]:
        return [word.strip(".,!?").lower() for word in text.split()]


@serve.deployment(num_replicas=2, max_ongoing_requests=8)
class Model:
    """Scores the mood of a text. As the slowest deployment it is scaled separately."""

    def __init__(self, good: set[str], bad: set[str]):
        self.good = good
        self.bad = bad

    async def score(self, tokens: list[str]) -> int:
        return sum((token in self.good) - (token in self.bad) for token in tokens)


@serve.deployment
class Summarizer:
    async def __call__(self, text: str) -> str:
        return text.partition(".")[0] + "."


@serve.deployment
@serve.ingress(api)
class TextService:
    def __init__(
        self,
        tokenizer: serve.DeploymentHandle,
        model: serve.DeploymentHandle,
        summarizer: serve.DeploymentHandle,
    ):
        self.tokenizer = tokenizer
        self.model = model
        self.summarizer = summarizer

    @api.get("/tokens")
    async def tokens(self, text: str) -> list[str]:
        tokens: list[str] = await self.tokenizer.remote(text)
        return tokens

    @api.get("/analyse")
    async def analyse(self, text: str) -> dict[str, int | str]:
        tokens = self.tokenizer.remote(text)
        score, summary = await asyncio.gather(
            self.model.score.remote(tokens), self.summarizer.remote(text)
        )
        return {"score": score, "summary": summary}


# Each bound deployment arrives in the constructor as a handle to it.
app = TextService.bind(
    Tokenizer.bind(),
    Model.bind(good={"fine", "good", "great"}, bad={"bad", "poor", "sad"}),
    Summarizer.bind(),
)
