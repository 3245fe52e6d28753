from fastapi import APIRouter, Depends, FastAPI
from fastapi_utils.cbv import cbv

PACKAGE = "fastapi-utils"
app, views = FastAPI(), APIRouter()


def name_of(name: str = "you"):
    return name


@cbv(views)
class View:
    name: str = Depends(name_of)

    @views.get("/view/{n}")
    async def get(self, n: int):
        return [self.name, n]

    @views.post("/view")
    def post(self):
        return self.name


app.include_router(views, prefix="/v1")


@app.get("/")
def root():
    return "root"


REQUESTS = ["GET /", "GET /v1/view/1?name=me", "GET /v1/view/x", "POST /v1/view"]
