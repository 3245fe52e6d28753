"""The main example: a FastAPI app served by two replicas of one class.

    ingress run app_examples.hello:hello

    curl 'http://127.0.0.1:8000/sync?name=Ada'    "hi, Ada"
    curl http://127.0.0.1:8000/async              "hi from the event loop"

The interactive API documentation is at http://127.0.0.1:8000/docs.
"""

from fastapi import FastAPI

import ingress as serve

app = FastAPI(title="Hello")


@serve.deployment(num_replicas=2, max_ongoing_requests=32)
@serve.ingress(app)
class Hello:
    """Greets. Each replica has its own instance, event loop and worker threads."""

    def __init__(self, greeting: str = "hello"):
        self.greeting = greeting

    @app.get("/sync")
    def sync_endpoint(self, name: str = "you") -> str:
        """Greet by name. FastAPI's rule: a `def` endpoint always runs in a thread."""
        return f"{self.greeting}, {name}"

    @app.get("/async")
    async def async_endpoint(self) -> str:
        """Greet from the replica's event loop, where every `async def` runs."""
        return f"{self.greeting} from the event loop"


hello = Hello.bind("hi")
