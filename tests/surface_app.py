"""An application with every feature of FastAPI in its OpenAPI schema, for schema-based tests."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Form, Header, HTTPException, Path, Query, Response
from pydantic import BaseModel, Field

import ingress as serve
from tests.servers import bind

# FastAPI answers a body that is not text with 400, which its schema does not mention.
app = FastAPI(title="Surface", responses={400: {"description": "The body cannot be read"}})
Name = Annotated[str, Field(min_length=1, max_length=20, pattern="^[a-z]+$")]
UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"description": "There is no such item"}}


class Size(BaseModel):
    width: Annotated[float, Field(gt=0, le=1e6, strict=True)]
    unit: Literal["mm", "inch"] = "mm"


class Item(BaseModel):
    name: Name
    price: Annotated[float, Field(ge=0, le=1e9, strict=True)]
    sizes: Annotated[list[Size], Field(max_length=5)] = []
    tags: dict[str, str] | None = None


class Stored(Item):
    id: int


async def page(
    skip: Annotated[int, Query(ge=0, le=1000)] = 0, limit: Annotated[int, Query(ge=1, le=10)] = 5
) -> slice:
    return slice(skip, skip + limit)


def shouting(x_shout: Annotated[bool, Header()] = False) -> bool:
    return x_shout


@serve.deployment(num_replicas=2)
@serve.ingress(app)
class Surface:
    def __init__(self) -> None:
        self.items = {1: Item(name="pen", price=2), 2: Item(name="ink", price=3)}

    @app.get("/items")
    async def find(
        self,
        which: Annotated[slice, Depends(page)],
        order: Literal["name", "price"] = "name",
        max_price: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    ) -> list[Stored]:
        """Find items, in `async def`."""
        found = [Stored(id=id, **item.model_dump()) for id, item in self.items.items()]
        cheap = [each for each in found if max_price is None or each.price <= max_price]
        return sorted(cheap, key=lambda each: str(getattr(each, order)))[which]

    @app.post("/items", status_code=201)
    def check(self, item: Item, shout: Annotated[bool, Depends(shouting)]) -> Item:
        """Take a body, in a `def` behind a `def` dependency."""
        return item.model_copy(update={"tags": {"shout": "yes"}}) if shout else item

    @app.get("/items/{id}", responses=UNKNOWN)
    async def one(self, id: Annotated[int, Path(ge=0, le=10**9)], response: Response) -> Stored:
        """Find one item, or none."""
        if id not in self.items:
            raise HTTPException(404, "There is no such item")
        response.headers["x-id"] = str(id)
        await asyncio.sleep(0)
        return Stored(id=id, **self.items[id].model_dump())

    @app.put("/names")
    def rename(self, names: list[Name], reverse: bool = False) -> list[str]:
        """Take a list."""
        return sorted(names, reverse=reverse)

    @app.post("/forms")
    async def form(
        self, name: Annotated[Name, Form()], count: Annotated[int, Form(ge=0, le=100)] = 1
    ) -> list[str]:
        """Take a form."""
        return [name] * count

    @app.delete("/items/{id}", status_code=204)
    async def remove(self, id: Annotated[int, Path(ge=0, le=10**9)]) -> None:
        """Answer with nothing."""


surface = bind(Surface)
