"""Three models on a replica that has room for two: each request names the one it wants.

    ingress run app_examples.multiplexed:app

    curl http://127.0.0.1:8000/loaded
    []
    curl -H 'serve_multiplexed_model_id: de' 'http://127.0.0.1:8000/greet?name=Ada'
    "Guten Tag, Ada"
    curl -H 'serve_multiplexed_model_id: en' 'http://127.0.0.1:8000/greet?name=Ada'
    "Good day, Ada"
    curl -H 'serve_multiplexed_model_id: fr' 'http://127.0.0.1:8000/greet?name=Ada'
    "Bonjour, Ada"

The first request for a model waits for its load, the next ones do not. The third model evicts the
least recently used one: `curl http://127.0.0.1:8000/loaded` now answers
`["en","fr"]`. With more replicas, a request goes to one that has its model.
"""

import asyncio

from fastapi import FastAPI, HTTPException

import ingress as serve

GREETINGS = {"de": "Guten Tag", "en": "Good day", "fr": "Bonjour"}

api = FastAPI(title="Greeters")


class Greeter:
    """Stands for a large model that is slow to load."""

    def __init__(self, language: str, loaded: list[str]):
        self.greeting = GREETINGS[language]
        self.language = language
        self.loaded = loaded
        loaded.append(language)

    def __del__(self):
        # Called once, when the model is evicted: free the memory of a GPU here, for instance.
        self.loaded.remove(self.language)


@serve.deployment
@serve.ingress(api)
class Greeters:
    def __init__(self):
        self.now_loaded: list[str] = []

    @serve.multiplexed(max_num_models_per_replica=2)
    async def greeter(self, language: str) -> Greeter:
        await asyncio.sleep(0.1)
        return Greeter(language, self.now_loaded)

    @api.get("/greet")
    async def greet(self, name: str) -> str:
        language = serve.get_multiplexed_model_id()
        if language not in GREETINGS:
            raise HTTPException(404, f"no model {language!r}; there are {sorted(GREETINGS)}")
        greeter = await self.greeter(language)
        return f"{greeter.greeting}, {name}"

    @api.get("/loaded")
    async def loaded(self) -> list[str]:
        return self.now_loaded


app = Greeters.bind()
