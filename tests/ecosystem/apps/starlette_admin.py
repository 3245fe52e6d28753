from fastapi import FastAPI
from sqlalchemy import Column, Integer, String, create_engine
from sqlalchemy.orm import declarative_base
from sqlalchemy.pool import StaticPool
from starlette_admin.contrib.sqla import Admin, ModelView

PACKAGE = "starlette-admin"
Base = declarative_base()
engine = create_engine("sqlite://", connect_args={"check_same_thread": False}, poolclass=StaticPool)


class Hero(Base):
    __tablename__ = "heroes"
    id = Column(Integer, primary_key=True)
    name = Column(String)


Base.metadata.create_all(engine)
app = FastAPI()
admin = Admin(engine, title="Heroes", secret_key="s" * 32)
admin.add_view(ModelView(Hero))
admin.mount_to(app)


@app.get("/")
def root():
    return "root"


REQUESTS = [
    "GET /", "GET /admin/", "GET /admin/hero/list",
    ("POST /admin/hero/create", {"data": {"name": "a"}}), "GET /admin/none/list",
]  # fmt: skip
VOLATILE = [r'csrf[^>]*"[^"]{30,}"']
