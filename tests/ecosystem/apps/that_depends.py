from typing import Annotated

from fastapi import Depends, FastAPI
from that_depends import BaseContainer, providers

PACKAGE = "that-depends"


async def resource():
    yield "resource"


class Container(BaseContainer):
    default_scope = None
    resource = providers.Resource(resource)
    service = providers.Factory(dict, name=resource.cast)


app = FastAPI()


@app.get("/")
async def root(service: Annotated[dict, Depends(Container.service)]):
    return service


REQUESTS = ["GET /"] * 3
