"""The application of the examples in this folder."""

from fastapi import FastAPI

import ingress as serve

app = FastAPI(title="Hello")


@serve.deployment
@serve.ingress(app)
class Hello:
    """Greets, with the greeting of its `user_config`."""

    def __init__(self):
        self.greeting = "hello"

    async def reconfigure(self, config):
        self.greeting = config["greeting"]

    @app.get("/")
    async def greet(self, name: str = "you") -> str:
        return f"{self.greeting}, {name}"


hello = Hello.bind()
