"""A catalogue of products in a database: SQLAlchemy 2, async, on SQLite or PostgreSQL.

    python -m app_examples.catalogue.app           # creates the table
    ingress run app_examples.catalogue.app:app

    curl http://127.0.0.1:8000/products            {"items":[],"next":null}

`DATABASE_URL` names the database, such as `postgresql+asyncpg://user:password@host/name`; by
default it is the file catalogue.db in the current folder. `docs/how-to/catalogue.md` has the rest.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import String, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import ingress as serve

AT_ONCE = 10  # requests of a replica, and connections of its pool: none waits for another's
LARGEST = 2**31 - 1  # an INTEGER of PostgreSQL


class Base(DeclarativeBase):
    pass


class Product(Base):
    __tablename__ = "products"

    id: Mapped[int] = mapped_column(primary_key=True)
    sku: Mapped[str] = mapped_column(String(40), unique=True)
    name: Mapped[str] = mapped_column(String(200))
    price_cents: Mapped[int]


class ProductIn(BaseModel):
    sku: str = Field(pattern=r"^[A-Z0-9-]{1,40}$")
    name: str = Field(min_length=1, max_length=200, pattern=r"^[^\x00]*$")  # PostgreSQL has no NUL
    price_cents: int = Field(ge=0, le=LARGEST)


class ProductOut(ProductIn):
    model_config = ConfigDict(from_attributes=True)

    id: int


class Page(BaseModel):
    items: list[ProductOut]
    next: int | None  # the value of `after` for the next page


def make_engine() -> AsyncEngine:
    url = os.environ.get("DATABASE_URL", "sqlite+aiosqlite:///catalogue.db")
    return create_async_engine(url, pool_size=AT_ONCE, max_overflow=0)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Make an engine for each replica: its connections belong to the replica's event loop."""
    engine = make_engine()
    app.state.sessions = async_sessionmaker(engine, expire_on_commit=False)
    yield
    await engine.dispose()


async def session_of(request: Request) -> AsyncIterator[AsyncSession]:
    """Yield the session of a request. Its end rolls back all that is not committed."""
    async with request.app.state.sessions() as session:
        yield session


Session = Annotated[AsyncSession, Depends(session_of)]
Id = Annotated[int, Path(ge=1, le=LARGEST)]

api = FastAPI(title="Catalogue", lifespan=lifespan)


@api.exception_handler(IntegrityError)
async def taken(request: Request, error: IntegrityError) -> JSONResponse:
    return JSONResponse({"detail": "another product has this sku"}, 409)


@serve.deployment(num_replicas=2, max_ongoing_requests=AT_ONCE)
@serve.ingress(api)
class Catalogue:
    @api.get("/products")
    async def list(
        self,
        session: Session,
        after: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
    ) -> Page:
        """Return the products after an id: such a page costs the same however far it is."""
        query = select(Product).where(Product.id > after).order_by(Product.id).limit(limit + 1)
        found = (await session.scalars(query)).all()
        items = [ProductOut.model_validate(each) for each in found[:limit]]
        return Page(items=items, next=items[-1].id if len(found) > limit else None)

    @api.post("/products", status_code=201)
    async def create(self, body: ProductIn, session: Session, response: Response) -> ProductOut:
        product = Product(**body.model_dump())
        session.add(product)
        await session.commit()
        response.headers["location"] = f"/products/{product.id}"
        return ProductOut.model_validate(product)

    @api.get("/products/{id}")
    async def read(self, id: Id, session: Session) -> ProductOut:
        return ProductOut.model_validate(await self.find(id, session))

    @api.put("/products/{id}")
    async def replace(self, id: Id, body: ProductIn, session: Session) -> ProductOut:
        product = await self.find(id, session)
        for name, value in body.model_dump().items():
            setattr(product, name, value)
        await session.commit()
        return ProductOut.model_validate(product)

    @api.delete("/products/{id}", status_code=204)
    async def delete(self, id: Id, session: Session) -> None:
        await session.delete(await self.find(id, session))
        await session.commit()

    async def find(self, id: int, session: AsyncSession) -> Product:
        product = await session.get(Product, id)
        if product is None:
            raise HTTPException(404, f"no product {id}")
        return product


async def create_tables() -> None:
    """Create the table. In production, migrations such as Alembic's do this."""
    engine = make_engine()
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    await engine.dispose()


app = Catalogue.bind()

if __name__ == "__main__":
    asyncio.run(create_tables())
