"""Every file of `app_examples`: the `curl` answers of its docstring, on both engines."""

import re
from collections.abc import Callable
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from tests.engines.client import Client
from tests.engines.scenarios.fastapi_classes import connected
from tests.engines.suite import Deviation, scenario

FOLDER = Path(__file__).parent.parent.parent.parent / "app_examples"
CURL = re.compile(r"^    curl '?http://127\.0\.0\.1:8000(/[^\s']*)'?(?: {4}|\n    )(\S.*)$", re.M)
NO_APPLICATIONS = {
    "slow_server": "is what other examples wait for, and no application",
    "processes": "is about replicas in processes, which all replicas on Ray are",
}
EXAMPLES = sorted({path.stem for path in FOLDER.glob("[a-z]*.py")} - {*NO_APPLICATIONS})
DEVIATIONS: dict[str, Deviation] = {}
"""Deviations of the examples that depend on running in one process."""


def application(name: str) -> Callable[[], Any]:
    def make() -> Any:
        module = import_module(f"app_examples.{name}")
        return module.hello if name == "hello" else module.app

    make.__name__ = f"example_{name}"
    return make


def curled(name: str) -> Callable[[Client], Any]:
    def observe(it: Client) -> Any:
        promised = CURL.findall(import_module(f"app_examples.{name}").__doc__ or "")
        assert promised
        return [[path, it.get(path).text] for path, _ in promised]

    return observe


def first_lines(*paths: str) -> Callable[[Client], Any]:
    """Return an observation that reads two lines of each stream and disconnects."""

    def observe(it: Client) -> Any:
        found = []
        for path in paths:
            with it.http.stream("GET", it.prefix + path) as response:
                lines = filter(None, response.iter_lines())
                found.append([response.headers.get("content-type"), *islice(lines, 2)])
        return found

    return observe


def eight_calls(it: Client) -> Any:
    calls = [it.handle.remote(number) for number in range(8)]
    return [int(call.result()) for call in calls]


def one_call(it: Client) -> Any:
    return it.handle.remote(1).result()


def rows_of_numbers(it: Client) -> Any:
    rows = it.get().json()
    return [len(rows), {len(row) for row in rows} == {len(rows)}]


def echoed(it: Client) -> Any:
    with connected(it, "/echo") as socket:
        socket.send("one")
        socket.send("two")
        return [it.get("/").text, socket.recv(), socket.recv()]


def greeted(it: Client) -> Any:
    languages = ["de", "en", "fr"]
    ids = ({"serve_multiplexed_model_id": language} for language in languages)
    return [it.get("/greet?name=Ada", **each).text for each in ids] + [it.get("/loaded").text]


OBSERVED: dict[str, Callable[[Client], Any]] = {
    "async_stream": first_lines("/"),
    "blocking_stream": first_lines("/"),
    "model": one_call,
    "multiplexed": greeted,
    "numpy_deployment": rows_of_numbers,
    "request_batching": eight_calls,
    "streams": first_lines("/lines", "/events", "/text"),
    "websocket_echo": echoed,
}

for _name in EXAMPLES:
    _observe = OBSERVED.get(_name) or curled(_name)
    _observe.__name__ = f"{_name}.py"
    _observe.__module__ = __name__
    _deviations = [DEVIATIONS[_name]] if _name in DEVIATIONS else []
    scenario("Examples", application(_name), *_deviations, columns=("local", "ray"), flags="0")(
        _observe
    )
