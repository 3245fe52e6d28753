import tempfile
import uuid
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI
from fastapi_users import BaseUserManager, FastAPIUsers, UUIDIDMixin, schemas
from fastapi_users.authentication import AuthenticationBackend, BearerTransport, JWTStrategy
from fastapi_users.db import SQLAlchemyBaseUserTableUUID, SQLAlchemyUserDatabase
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase

PACKAGE = "fastapi-users[sqlalchemy]"
SECRET = "s" * 32


class Base(DeclarativeBase):
    pass


class User(SQLAlchemyBaseUserTableUUID, Base):
    pass


class UserRead(schemas.BaseUser[uuid.UUID]):
    pass


class UserCreate(schemas.BaseUserCreate):
    pass


engine = create_async_engine(f"sqlite+aiosqlite:///{tempfile.mkdtemp()}/users.db")
sessions = async_sessionmaker(engine, expire_on_commit=False)


class UserManager(UUIDIDMixin, BaseUserManager[User, uuid.UUID]):
    reset_password_token_secret = verification_token_secret = SECRET


async def get_session():
    async with sessions() as session:
        yield session


async def get_user_db(session: AsyncSession = Depends(get_session)):
    yield SQLAlchemyUserDatabase(session, User)


async def get_user_manager(user_db=Depends(get_user_db)):
    yield UserManager(user_db)


backend = AuthenticationBackend(
    name="jwt",
    transport=BearerTransport(tokenUrl="auth/login"),
    get_strategy=lambda: JWTStrategy(secret=SECRET, lifetime_seconds=3600),
)
users = FastAPIUsers[User, uuid.UUID](get_user_manager, [backend])
current = users.current_user(active=True)


@asynccontextmanager
async def lifespan(app):
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield


app = FastAPI(lifespan=lifespan)
app.include_router(users.get_auth_router(backend), prefix="/auth")
app.include_router(users.get_register_router(UserRead, UserCreate), prefix="/auth")


@app.get("/me")
async def me(user: User = Depends(current)):
    return user.email


def talk(client):
    form = {"username": "a@example.com", "password": "secret"}
    token = client.post("/auth/login", data=form).json()["access_token"]
    headers = {"Authorization": f"Bearer {token}"}
    return [client.get("/me", headers=headers).json() for _ in range(8)]


REQUESTS = [
    ("POST /auth/register", {"json": {"email": "a@example.com", "password": "secret"}}),
    ("POST /auth/register", {"json": {"email": "a@example.com", "password": "secret"}}),
    "GET /me",
]
VOLATILE = [r'"id":"[^"]*"']
