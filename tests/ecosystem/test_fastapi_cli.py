"""`fastapi run --app` and `fastapi dev --app` serve an application."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.ecosystem.document import version_of
from tests.programs import environment, free_port, process, write_module
from tests.servers import get, is_ready, wait_until

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.skipif(version_of("fastapi-cli") == "", reason="make test-ecosystem"),
]

HELLO = """
from fastapi import FastAPI
import ingress as serve

app = FastAPI()

@serve.deployment
@serve.ingress(app)
class Hello:
    @app.get("/")
    def root(self): return "hello"

hello = Hello.bind()
"""


@pytest.mark.parametrize("command", ["run", "dev"])
def test_an_application_is_served_by_its_name(command: str, tmp_path: Path) -> None:
    write_module(tmp_path, "hello", HELLO)
    port = free_port()
    cli = Path(sys.executable).with_name("fastapi")
    arguments = [str(cli), command, "hello.py", "--app", "hello", "--port", str(port)]
    with process(arguments, tmp_path, environment(tmp_path)) as server:
        wait_until(lambda: is_ready(port))
        assert get(port, "/").body == b'"hello"'
        server.signal()  # `dev` has a child, which it then ends
        server.wait()
