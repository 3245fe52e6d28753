from dishka import Provider, Scope, make_async_container, provide
from dishka.integrations.fastapi import FromDishka, inject, setup_dishka
from fastapi import FastAPI

PACKAGE = "dishka"


class Counters(Provider):
    @provide(scope=Scope.APP)
    def start(self) -> int:
        return 40

    @provide(scope=Scope.REQUEST)
    def name(self, start: int) -> str:
        return f"request {start + 2}"


app = FastAPI()
setup_dishka(make_async_container(Counters()), app)


@app.get("/")
@inject
async def root(name: FromDishka[str], n: int = 0):
    return [name, n]


REQUESTS = ["GET /", "GET /?n=1", "GET /?n=x", "GET /"]
