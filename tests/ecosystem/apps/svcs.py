import svcs
from fastapi import FastAPI

PACKAGE = "svcs"


@svcs.fastapi.lifespan
async def lifespan(app: FastAPI, registry: svcs.Registry):
    registry.register_factory(dict, lambda: {"made": "here"})
    yield {"note": "state"}


app = FastAPI(lifespan=lifespan)


@app.get("/")
async def root(services: svcs.fastapi.DepContainer):
    return services.get(dict)


REQUESTS = ["GET /"] * 3
