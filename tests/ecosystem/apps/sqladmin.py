from fastapi import FastAPI
from sqladmin import Admin, ModelView
from sqlalchemy import Column, Integer, String, create_engine
from sqlalchemy.orm import declarative_base
from sqlalchemy.pool import StaticPool

PACKAGE = "sqladmin"
Base = declarative_base()
engine = create_engine("sqlite://", connect_args={"check_same_thread": False}, poolclass=StaticPool)


class Hero(Base):
    __tablename__ = "heroes"
    id = Column(Integer, primary_key=True)
    name = Column(String)


Base.metadata.create_all(engine)
app = FastAPI()


class HeroAdmin(ModelView, model=Hero):
    column_list = [Hero.id, Hero.name]


Admin(app, engine).add_view(HeroAdmin)


@app.get("/")
def root():
    return "root"


REQUESTS = [
    "GET /", "GET /admin/", "GET /admin/hero/list",
    ("POST /admin/hero/create", {"data": {"name": "a"}}), "GET /admin/hero/list",
]  # fmt: skip
