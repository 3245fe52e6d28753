from fastapi import FastAPI
from fastapi_injector import Injected, attach_injector
from injector import Injector

PACKAGE = "fastapi-injector"


class Service:
    name = "injected"


app = FastAPI()
attach_injector(app, Injector([lambda binder: binder.bind(Service, to=Service())]))


@app.get("/")
async def root(service: Service = Injected(Service)):
    return service.name


REQUESTS = ["GET /"] * 3
