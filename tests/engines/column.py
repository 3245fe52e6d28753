"""All scenarios of one column, at one value of the flag, in this process.

    python -m tests.engines.column local 0 FOLDER [--only NAME ...]

The result is FOLDER/local-0.json: `{name: observation}`, or `{name: {"failed": ...}}`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import threading
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from app_examples import slow_server
from ingress.core.base.settings import (
    ENGINE,
    ROUTER_IN_SEPARATE_LOOP,
    SYNC_IN_THREADPOOL,
    USER_CODE_IN_SEPARATE_THREAD,
)
from tests.engines.api import COLUMN, serve
from tests.engines.client import Client, discard
from tests.engines.probe import FOLDER, wait_until
from tests.engines.suite import Factory, Scenario, scenarios

ROOT = Path(__file__).parent.parent.parent
AHEAD = 3
"""Number of applications that start while one is observed. On Ray each replica is a process, which
costs processor time even if idle."""
SCENARIO_S = 120.0


def environment(column: str, flag: str, folder: Path) -> dict[str, str]:
    """Return the environment of a column, for its driver and its replicas: each flag is set."""
    return {
        COLUMN: column,
        FOLDER: str(folder / f"{column}-{flag}"),
        SYNC_IN_THREADPOOL: flag,
        USER_CODE_IN_SEPARATE_THREAD: "1",
        ROUTER_IN_SEPARATE_LOOP: "1",
        "PYTHONPATH": str(ROOT),
    }


def observe(column: str, flag: str, url: str, only: list[str]) -> dict[str, Any]:
    """Run the scenarios, application by application; the next ones start meanwhile."""
    chosen = [
        each
        for each in scenarios()
        if ("local" if column == "process" else column) in each.columns
        and flag in each.flags
        and (not only or {each.name, each.module} & {*only})
    ]
    suffix = f"_{column}{flag}"
    groups: dict[Factory, list[Scenario]] = {}
    for each in chosen:
        if each.app is not None:
            groups.setdefault(each.app, []).append(each)
    alone = [each for each in chosen if each.app is None]
    applications = [(f.__name__ + suffix, f()) for f in groups]
    found: dict[str, Any] = {}

    def observe_alone() -> None:
        for each in alone:
            found[each.name] = _observed(each, Client("", url, suffix=suffix))

    with ThreadPoolExecutor(AHEAD + 1) as starting, ThreadPoolExecutor(AHEAD) as stopping:
        starting.submit(observe_alone)  # these scenarios mostly wait
        waiting = iter(applications)
        started: deque[Future[Client | str]] = deque()

        def start_next() -> None:
            for name, app in islice(waiting, 1):
                started.append(starting.submit(_deploy, app, name, url, suffix))

        for _ in range(AHEAD):
            start_next()
        for factory, members in groups.items():
            begin = time.monotonic()
            client = started.popleft().result()
            start_next()
            ready = time.monotonic()
            for each in members:
                found[each.name] = _observed(each, client)
            stopping.submit(_delete, factory.__name__ + suffix, client)
            took, waited = time.monotonic() - begin, ready - begin
            print(
                f"{factory.__name__} ({len(members)}): {took:.1f} s, {waited:.1f} waiting",
                flush=True,
            )
    return {each.name: found[each.name] for each in chosen}


def _observed(scenario: Scenario, client: Client | str) -> Any:
    if isinstance(client, str):
        return {"failed": client}
    try:
        if scenario.app is None:
            with client:
                seen = _in_time(scenario, client)
        else:
            seen = _in_time(scenario, client)
        return json.loads(json.dumps(seen).replace(client.suffix, ""))
    except Exception:
        return {"failed": traceback.format_exc()}


def _in_time(scenario: Scenario, client: Client) -> Any:
    """Run a scenario in a separate thread, which is abandoned if it hangs."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(scenario.observe(client))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(SCENARIO_S)
    except TimeoutError:
        if answer.done():  # the scenario's own `TimeoutError`
            raise
        raise AssertionError(f"still waiting after {SCENARIO_S} s") from None


def _deploy(app: Any, name: str, url: str, suffix: str) -> Client | str:
    """Deploy an application; return a client of it, or the traceback of the failure."""
    try:
        handle = serve.run(app, name=name, route_prefix=f"/{name}")
        client = Client(name, url, handle, suffix)
        wait_until(lambda: f"/{name}" in client.http.get("/-/routes").json(), name)
    except Exception:
        return traceback.format_exc()
    return client


def _delete(name: str, client: Client | str) -> None:
    if isinstance(client, Client):
        client.__exit__()
    discard(name)


def _take_turns() -> None:
    """Let one thread at a time build Ray's options.

    Each registers its router's module for pickling by value, a setting of the whole process. A
    thread that deploys and one that is notified of a deployment undo it for each other, and
    `serve.run` fails with "is not registered for pickle by value" (Ray 2.60.0, serve/config.py).
    """
    config = import_module("ray.serve.config").RequestRouterConfig
    serialize, lock = config._serialize_request_router_cls, threading.Lock()

    def one_at_a_time(self: Any) -> None:
        with lock:
            serialize(self)

    config._serialize_request_router_cls = one_at_a_time


def main() -> int:
    parser = ArgumentParser("python -m tests.engines.column", description=__doc__)
    parser.add_argument("column")
    parser.add_argument("flag", choices="01")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--address", help="of the Ray cluster")
    parser.add_argument("--url", help="of its HTTP server")
    parser.add_argument("--only", nargs="*", default=[], help="names or modules")
    options = parser.parse_args()
    variables = environment(options.column, options.flag, options.folder.resolve())
    missing = {name for name, value in variables.items() if os.environ.get(name) != value}
    if missing:  # the API is chosen, and Ray reads its flags, at import
        os.environ.update(variables)
        os.execv(sys.executable, [sys.executable, "-m", "tests.engines.column", *sys.argv[1:]])
    shutil.rmtree(variables[FOLDER], ignore_errors=True)
    Path(variables[FOLDER]).mkdir(parents=True)
    logging.disable(logging.WARNING)
    with slow_server.running() as slow:  # for the examples, and for the replicas they run in
        variables["SLOW_SERVER_URL"] = os.environ["SLOW_SERVER_URL"] = slow.url
        found = _run(options, variables)
    path = options.folder / f"{options.column}-{options.flag}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _run(options: Namespace, variables: dict[str, str]) -> dict[str, Any]:
    url = options.url
    if options.column in ("local", "process"):
        serve.start(http_options={"port": 0})
        [url] = serve.status().proxies
    else:
        ray = import_module("ray")
        _take_turns()
        if options.column == "ray":
            os.environ[ENGINE] = "ray"
        ray.init(options.address, runtime_env={"env_vars": variables}, log_to_driver=False)
    found = observe(options.column, options.flag, url, options.only)
    if options.column in ("local", "process"):
        serve.shutdown()
    return found


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the threads of a hanging scenario cannot be ended
