"""`app_examples/catalogue` on SQLite and on PostgreSQL, and docs/how-to/catalogue.md.

Debian's PostgreSQL is started in a temporary folder, without a TCP port.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ingress.testing import AsyncClient
from tests.conformance.observe import Served, here, online
from tests.how_to import check_page
from tests.servers import PATIENCE_S, bind, wait_until

pytest.importorskip("sqlalchemy.ext.asyncio", reason="needs the extra `apps`", exc_type=ImportError)
pytest.importorskip("aiosqlite", reason="needs the extra `apps`")
pytest.importorskip("asyncpg", reason="needs the extra `apps`")

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app_examples.catalogue import app as example

BOLT = {"sku": "M8-40", "name": "Bolt", "price_cents": 12}


def programs() -> Path | None:
    """Return the folder of PostgreSQL's programs, which Debian does not put into the PATH."""
    found = [*Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if in_path := shutil.which("initdb"):
        found.append(Path(in_path).resolve())
    return found[-1].parent if found else None


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    """Start PostgreSQL and return the URL of a database. It refuses to run as root."""
    binaries = programs()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    nobody = pwd.getpwnam("nobody")
    user = {"user": nobody.pw_uid, "group": nobody.pw_gid} if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory(prefix="postgresql-", ignore_cleanup_errors=True) as folder:
        if user:
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **user}
        data = f"{folder}/data"
        make = [str(binaries / "initdb"), "-D", data, "-U", "test", "-A", "trust", "--no-sync"]
        subprocess.run(make, cwd=folder, check=True, timeout=PATIENCE_S, **quiet)
        options = ["-c", "listen_addresses=", "-c", "fsync=off", "-k", folder]
        server = subprocess.Popen(
            [str(binaries / "postgres"), "-D", data, *options], cwd=folder, **quiet
        )
        ready = [str(binaries / "pg_isready"), "-h", folder, "-U", "test"]
        try:
            wait_until(lambda: subprocess.run(ready, check=False, **quiet).returncode == 0)
            yield f"postgresql+asyncpg://test@/postgres?host={folder}"
        finally:
            server.send_signal(signal.SIGINT)  # which does not wait for connections
            server.wait(PATIENCE_S)


def without_lifespan(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def _make_tables() -> None:
    engine = example.make_engine()
    async with engine.begin() as connection:
        await connection.run_sync(example.Base.metadata.drop_all)
    await engine.dispose()
    await example.create_tables()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have an empty table in a database, which the environment names."""
    if request.param == "sqlite":
        url = f"sqlite+aiosqlite:///{tmp_path}/catalogue.db"
    else:
        url = request.getfixturevalue("postgresql")
    monkeypatch.setenv("DATABASE_URL", url)
    # In a thread, whose stack has no plugin of ingress: see `blocking_call_check`.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, _make_tables()).result()


@pytest.fixture
def it(database: None) -> Iterator[Served]:
    with online(example.app) as served:
        yield served


def test_a_product_is_created_read_replaced_and_deleted(it: Served) -> None:
    created = it.client.post("/products", json=BOLT)
    path = created.headers["location"]
    assert (created.status_code, it.get(path).json()) == (201, created.json())

    dearer = {**BOLT, "price_cents": 15}
    replaced = it.client.put(path, json=dearer)
    assert (replaced.status_code, replaced.json()) == (200, {**dearer, "id": created.json()["id"]})
    assert it.get(path).json() == replaced.json()

    assert it.client.delete(path).status_code == 204
    assert [it.get(path).status_code, it.client.delete(path).status_code] == [404, 404]


def test_pages_follow_one_another_until_the_last(it: Served) -> None:
    for number in range(5):
        it.client.post("/products", json={**BOLT, "sku": f"M8-{number}"})
    found: list[list[str]] = []
    after: int | None = 0
    while after is not None:
        page = it.get(f"/products?limit=2&after={after}").json()
        found.append([each["sku"] for each in page["items"]])
        after = page["next"]

    assert found == [["M8-0", "M8-1"], ["M8-2", "M8-3"], ["M8-4"]]


def test_of_clients_that_create_the_same_product_at_once_one_succeeds(it: Served) -> None:
    with ThreadPoolExecutor(16) as pool:
        posts = [pool.submit(it.client.post, "/products", json=BOLT) for _ in range(16)]
    answers: list[Any] = [post.result() for post in posts]

    assert sorted(each.status_code for each in answers) == [201] + [409] * 15
    assert len(it.get("/products").json()["items"]) == 1


def test_a_sku_of_another_product_is_refused_and_nothing_is_changed(it: Served) -> None:
    it.client.post("/products", json=BOLT)
    nut = it.client.post("/products", json={"sku": "N8", "name": "Nut", "price_cents": 3})
    path = nut.headers["location"]

    refused = it.client.put(path, json={"sku": "M8-40", "name": "Bolt?", "price_cents": 1})

    assert (refused.status_code, refused.json()) == (
        409,
        {"detail": "another product has this sku"},
    )
    assert it.get(path).json() == nut.json()


@pytest.mark.parametrize(
    ("method", "path", "change"),
    [
        ("POST", "/products", {"sku": "m8"}),
        ("POST", "/products", {"name": "Bo\0lt"}),
        ("POST", "/products", {"name": ""}),
        ("POST", "/products", {"price_cents": -1}),
        ("POST", "/products", {"price_cents": 2**31}),
        ("GET", "/products/0", {}),
        ("GET", f"/products/{2**31}", {}),
        ("GET", "/products?limit=101", {}),
        ("GET", f"/products?after={2**31}", {}),
    ],
)
def test_a_value_that_the_database_cannot_have_is_refused(
    method: str, path: str, change: dict[str, Any], it: Served
) -> None:
    response = it.client.request(method, path, json={**BOLT, **change})

    assert response.status_code == 422
    assert len(response.json()["detail"]) == 1


def test_an_unknown_product_is_not_found(it: Served) -> None:
    statuses = [
        it.get("/products/9").status_code,
        it.client.put("/products/9", json=BOLT).status_code,
        it.client.delete("/products/9").status_code,
    ]

    assert statuses == [404] * 3


def test_each_replica_has_an_engine_on_its_own_loop(database: None) -> None:
    places = set()

    class Catalogue(example.Catalogue.func_or_class):  # type: ignore[misc, name-defined]
        async def find(self, number: int, session: Any) -> Any:
            places.add((here(), id(session.bind)))
            return await super().find(number, session)

    deployment: Any = example.Catalogue
    with online(bind(dataclasses.replace(deployment, func_or_class=Catalogue))) as it:
        it.client.post("/products", json=BOLT)
        answers = [each.result() for each in it.send("/products/1", 40)]

    assert {each.status_code for each in answers} == {200}
    assert len(places) == len({loop for loop, _ in places}) == 2


@pytest.mark.thorough
def test_its_page_shows_its_code_and_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    check_page("catalogue", tmp_path)


def test_an_async_test_rolls_back_the_session_that_it_shares_with_the_endpoints(
    database: None,
) -> None:
    async def test(client_of: Callable[[Any], Any]) -> None:
        engine = example.make_engine()
        async with engine.connect() as connection, connection.begin() as transaction:
            mode = "rollback_only"  # an endpoint that commits leaves the transaction open
            async with AsyncSession(
                connection, expire_on_commit=False, join_transaction_mode=mode
            ) as session:
                overrides = example.api.dependency_overrides
                overrides[example.session_of] = lambda: session
                async with client_of(example.app) as client:
                    created = await client.post("/products", json=BOLT)
                    assert created.status_code == 201
                    assert await session.get(example.Product, created.json()["id"])
                    read = await client.get(created.headers["location"])
                    assert read.json() == created.json()
                overrides.clear()
            await transaction.rollback()
        async with engine.connect() as connection:
            assert not (await connection.execute(select(example.Product))).all()
        await engine.dispose()

    for each in (without_lifespan, AsyncClient):
        asyncio.run(test(each))
