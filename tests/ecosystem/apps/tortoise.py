from fastapi import FastAPI
from tortoise import fields
from tortoise.contrib.fastapi import RegisterTortoise
from tortoise.models import Model

PACKAGE = "tortoise-orm"


class Hero(Model):
    id = fields.IntField(primary_key=True)
    name = fields.CharField(50)


async def lifespan(app):
    import tempfile

    async with RegisterTortoise(
        app,
        db_url=f"sqlite://{tempfile.gettempdir()}/ecosystem-{id(Hero)}.sqlite3",
        modules={"models": [__name__]},
        generate_schemas=True,
    ):
        await Hero.all().delete()
        yield


from contextlib import asynccontextmanager

app = FastAPI(lifespan=asynccontextmanager(lifespan))


@app.post("/heroes/{name}")
async def add(name: str):
    await Hero.create(name=name)
    return await Hero.all().count()


@app.get("/heroes")
async def heroes():
    return [each.name async for each in Hero.all().order_by("id")]


REQUESTS = ["POST /heroes/a", "POST /heroes/b", "GET /heroes", "GET /heroes"]
