from dependency_injector import containers, providers
from dependency_injector.wiring import Provide, inject
from fastapi import Depends, FastAPI

PACKAGE = "dependency-injector"


class Container(containers.DeclarativeContainer):
    config = providers.Configuration()
    service = providers.Factory(dict, name=config.name)


container = Container()
container.config.name.from_value("injected")
app = FastAPI()
app.container = container


@app.get("/async")
@inject
async def of_async(service: dict = Depends(Provide[Container.service])):
    return service


@app.get("/sync")
@inject
def of_sync(service: dict = Depends(Provide[Container.service])):
    return [service, app.container.config.name()]


container.wire(modules=[__name__])
REQUESTS = ["GET /async", "GET /sync"] * 2
