from fastapi import FastAPI
from fastapi_filter import FilterDepends
from fastapi_filter.contrib.sqlalchemy import Filter

PACKAGE = "fastapi-filter"
app = FastAPI()


class Items(Filter):
    name: str | None = None
    size__gt: int | None = None


@app.get("/items")
async def items(given: Items = FilterDepends(Items)):
    return given.model_dump(exclude_none=True)


REQUESTS = ["GET /items", "GET /items?name=x&size__gt=3", "GET /items?size__gt=x"]
