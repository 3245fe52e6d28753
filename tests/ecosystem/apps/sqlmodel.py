from fastapi import Depends, FastAPI
from sqlalchemy.pool import StaticPool
from sqlmodel import Field, Session, SQLModel, create_engine, select

PACKAGE = "sqlmodel"


class Hero(SQLModel, table=True):
    id: int | None = Field(default=None, primary_key=True)
    name: str


engine = create_engine("sqlite://", connect_args={"check_same_thread": False}, poolclass=StaticPool)
SQLModel.metadata.create_all(engine)
app = FastAPI()


def get_session():
    with Session(engine) as session:
        yield session


@app.post("/heroes")
def add(hero: Hero, session: Session = Depends(get_session)) -> Hero:
    session.add(hero)
    session.commit()
    session.refresh(hero)
    return hero


@app.get("/heroes")
def heroes(session: Session = Depends(get_session)) -> list[Hero]:
    return list(session.exec(select(Hero)).all())


REQUESTS = [
    ("POST /heroes", {"json": {"name": "a"}}),
    ("POST /heroes", {"json": {}}),
    "GET /heroes",
]
