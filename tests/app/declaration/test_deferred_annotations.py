"""Annotations that are evaluated late: all from Python 3.14 on, before with `from __future__`.

They may name a class that is defined below, one that only a type checker imports, or the class
itself, whose name is a deployment's by then.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import ingress as serve
from ingress.core.base.settings import Settings
from ingress.observe.inspection import explain
from tests.servers import PATIENCE_S

pytestmark = pytest.mark.usefixtures("shutdown")

FUTURE = "from __future__ import annotations\n"
PROGRAM = """
from typing import TYPE_CHECKING, Annotated
from fastapi import Depends, FastAPI
from pydantic import BaseModel
import ingress as serve
if TYPE_CHECKING:
    from nowhere import Never

app = FastAPI()

class Item(BaseModel):
    name: str
    inner: Inner | None = None

class Inner(BaseModel):
    size: int

def user(name: str = "me") -> Never:
    return name

@serve.deployment(user_config={"a": 1})
@serve.ingress(app)
class Api:
    kept: Never = 1

    def __init__(self, given: Never | None = None) -> None:
        self.given = given

    @app.post("/items")
    async def create(self, item: Item, user: Annotated[str, Depends(user)]) -> Item:
        return item

    async def reconfigure(self, config: Never) -> None: ...

    async def plain(self, value: Never | None, other: Api | None = None) -> Api | None:
        return value

    @serve.batch(max_batch_size=2)
    async def batched(self, values: list[Never]) -> list[Api | None]:
        return values

    @serve.multiplexed(max_num_models_per_replica=2)
    async def model(self, model_id: Never) -> Api | None:
        return model_id

@serve.deployment
class Handles:
    def __init__(self, api: Never) -> None:
        self.api = api

    async def __call__(self, request: Never) -> Handles | None:
        return await self.api.plain.remote(request)

api = Api.bind()
handles = Handles.bind(api)
"""


@pytest.fixture(params=["", FUTURE], ids=["deferred", "future"])
def module(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    if not request.param and sys.version_info < (3, 14):
        pytest.skip("annotations are evaluated at once before Python 3.14")
    (tmp_path / f"{tmp_path.name}.py").write_text(request.param + PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module(tmp_path.name)


def test_a_request_finds_models_that_are_defined_later(module: Any) -> None:
    with TestClient(module.api) as client:
        answer = client.post("/items", json={"name": "x", "inner": {"size": 1}})
        wrong = client.post("/items", json={"name": "x", "inner": {"size": "large"}})
    assert answer.json() == {"name": "x", "inner": {"size": 1}}
    assert [each["loc"] for each in wrong.json()["detail"]] == [["body", "inner", "size"]]


def test_names_that_no_module_has_are_never_read(module: Any) -> None:
    handles = serve.run(module.handles, route_prefix=None)
    assert handles.remote(3).result(timeout_s=PATIENCE_S) == 3
    api = serve.get_deployment_handle("Api", "default")
    assert api.batched.remote(4).result(timeout_s=PATIENCE_S) == 4
    assert api.model.remote("m").result(timeout_s=PATIENCE_S) == "m"
    rows = explain(module.handles, Settings()).rows
    assert {"Api.plain", "Api.batched", "Handles.__call__"} <= {each.name for each in rows}
