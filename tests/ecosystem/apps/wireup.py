import wireup
from fastapi import APIRouter, FastAPI, Request
from wireup import Injected, injectable
from wireup.integration import fastapi

PACKAGE = "wireup"


@injectable(lifetime="scoped")
class Greeter:
    def __init__(self, request: Request):
        self.path = request.url.path

    def greet(self, n):
        return f"{n} {self.path}"


app = FastAPI()
router = APIRouter()


@app.get("/async")
async def of_async(greeter: Injected[Greeter], n: int = 1):
    return greeter.greet(n)


@app.get("/sync")
def of_sync(request: Request, greeter: Injected[Greeter], n: int = 2):
    return greeter.greet(n), request.method


@router.get("/sync")
def of_router(greeter: Injected[Greeter]):
    return greeter.greet(3)


app.include_router(router, prefix="/in")
fastapi.setup(wireup.create_async_container(injectables=[Greeter, fastapi]), app)

REQUESTS = ["GET /async", "GET /sync?n=4", "GET /sync?n=x", "GET /in/sync"]
