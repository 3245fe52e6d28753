"""`asgi.unserved_routes`: a route that no deployment serves is named, with file, line and fix."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import ingress as package
from ingress.exceptions import RouteNotServedWarning
from tests.asgi_helpers import bound, serve
from tests.servers import get, ingress_run, served, write_module

HEAD = """import inspect
from typing import Annotated
from fastapi import APIRouter, Depends, FastAPI
import ingress as serve
app, other, router = FastAPI(), FastAPI(), APIRouter()
"""

UNRELATED = """
class Other:
    @app.get("/other")
    def lost(self): ...
@serve.ingress(app)
class K:
    @app.get("/")
    def root(self): ...
"""

WRONG_APP = """
@serve.ingress(other)
class K:
    @app.get("/")
    def lost(self): ...
"""

NOT_INCLUDED = """
@serve.ingress(app)
class K:
    @app.get("/")
    def root(self): ...
    @router.get("/more")
    def lost(self): ...
"""

NO_ROUTE = """
@serve.ingress(app)
class K:
    def lost(self): ...
"""

MISTAKES = {
    "unrelated": (UNRELATED, 8, "Other.lost", "put @serve.ingress(...) on its own class"),
    "wrong-app": (WRONG_APP, 9, "K.lost", "Write @serve.ingress(app)."),
    "not-included": (NOT_INCLUDED, 11, "K.lost", "or app.include_router(router)"),
}


@pytest.fixture(autouse=True)
def own_module() -> Iterator[None]:
    yield
    sys.modules.pop("of_user", None)


def load(tmp_path: Path, text: str) -> tuple[str, Any]:
    file = tmp_path / "of_user.py"
    file.write_text(HEAD + text)
    module = type(sys)("of_user")
    sys.modules["of_user"] = module
    exec(compile(file.read_text(), str(file), "exec", dont_inherit=True), vars(module))
    return str(file), module


@pytest.mark.parametrize(("text", "line", "name", "fix"), MISTAKES.values(), ids=MISTAKES)
def test_a_route_that_is_left_over_is_named_once(
    tmp_path: Path, text: str, line: int, name: str, fix: str
) -> None:
    file, module = load(tmp_path, text)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        bound(module.K)
        bound(module.K)

    assert len(said) == 1
    assert said[0].category is RouteNotServedWarning
    assert (said[0].filename, said[0].lineno) == (file, line)
    assert str(said[0].message).startswith(f"{name} ({file}:{line}) is a ")
    assert fix in str(said[0].message)


def test_a_class_without_routes_logs_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, module = load(tmp_path, NO_ROUTE)

    bound(module.K)
    bound(module.K)

    assert [each.message.partition(", whose")[0] for each in caplog.records] == [
        f"K.lost ({file}:9) is a method of K"
    ]


def test_a_class_that_has_neither_routes_nor_call_is_named_where_it_is_an_asgi_app(
    caplog: pytest.LogCaptureFixture, shutdown: None
) -> None:
    class Base:
        async def __call__(self) -> str:
            return "called"

    class Lost:
        async def predict(self) -> None: ...

    class Served(Base): ...

    for cls, status in ((Lost, 500), (Served, 200)):
        target = package.deployment(cls).bind()
        assert get(served(target), "/").status == status
        assert "has no `__call__`" not in caplog.text  # handles may call its methods
        package.shutdown()
        caplog.clear()
        with TestClient(target, raise_server_exceptions=False) as client:
            assert client.get("/").status_code == status
        said = caplog.text.count(f"{cls.__name__} has no `__call__` and no routes")
        assert said == (1 if cls is Lost else 0)
        caplog.clear()


def test_ingress_run_says_that_a_class_has_neither_routes_nor_call(tmp_path: Path) -> None:
    text = "import ingress as serve\nclass Lost:\n    def predict(self): ...\n"
    write_module(tmp_path, "of_servers", f"{text}lost = serve.deployment(Lost).bind()\n")
    with ingress_run(tmp_path, "of_servers:lost") as server:
        assert get(server.port, "/").status == 500
        assert server.output.count("of_servers.Lost has no `__call__` and no routes") == 1


def test_deployments_that_share_an_app_are_no_mistake(tmp_path: Path) -> None:
    _, module = load(
        tmp_path,
        """
class Base:
    @router.get("/base")
    def base(self): return type(self).__name__
@serve.ingress(app)
class A(Base):
    @app.get("/a")
    def a(self): return "a"
@serve.ingress(app)
class B(Base):
    @app.get("/b")
    def b(self): return "b"
@serve.ingress(other)
class C:
    @other.get("/c")
    def c(self): return "c"
app.include_router(router)
""",
    )

    with serve(module.A) as client:
        assert [client.get(path).status_code for path in ("/a", "/base", "/b")] == [200, 200, 404]
    bound(module.B)
    bound(module.C)


def test_a_self_that_is_a_dependency_is_the_routers_own(tmp_path: Path) -> None:
    _, module = load(
        tmp_path,
        """
class View:
    def __init__(self, name: str = "you"):
        self.name = name
    def of_default(self, n: int = 1): return [self.name, n]
    @router.get("/annotated")
    def of_annotation(self: Annotated[object, Depends(lambda: View())], n: int):
        return [self.name, n]
def shown(self=Depends(View), *, n: int = 1): ...
View.of_default.__signature__ = inspect.signature(shown)
router.get("/default")(View.of_default)
app.include_router(router, prefix="/view")
@serve.ingress(app)
class K:
    @app.get("/")
    def root(self): ...
""",
    )

    with serve(module.K) as client:
        assert client.get("/view/default?name=me&n=2").json() == ["me", 2]
        assert client.get("/view/annotated?n=3").json() == ["you", 3]
        assert set(client.get("/openapi.json").json()["paths"]) == {
            "/", "/view/default", "/view/annotated",
        }  # fmt: skip
