"""One form of an app, served by uvicorn, and its answers, as JSON on standard output.

python -m tests.ecosystem.serving NAME REPLICAS
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from typing import Any

import httpx
import uvicorn

from tests.ecosystem.as_class import load

STARTING_S = 30.0
SETTLING_S = 1.0
"""Spans and events may end after the response: `talk` reads them afterwards."""

MARK = "ANSWERS "


def answers_of(name: str, replicas: int) -> list[Any]:
    """Serve the app and return the answers to its requests, and to that for its schema."""
    app, module = load(name, replicas)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    running = threading.Thread(target=server.run, args=([listening],), daemon=True)
    running.start()
    until = time.monotonic() + STARTING_S
    while not server.started:
        if not running.is_alive() or time.monotonic() > until:
            raise RuntimeError("the app does not start")
        time.sleep(0.02)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    # A server closes the connection of an app that failed; the next request would race with that.
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=url, timeout=10, limits=limits) as client:
        found = [_answer(client, each, module) for each in module.REQUESTS]
        if hasattr(module, "talk"):
            time.sleep(SETTLING_S)
            found += module.talk(client)
        if getattr(module, "SCHEMA", True):
            found.append(client.get("/openapi.json").json())
    server.should_exit = True
    running.join(10)
    return found


def _answer(client: httpx.Client, request: Any, module: Any) -> Any:
    """Return status, body and the compared headers; `request` is "GET /path" or has options."""
    line, options = (request, {}) if isinstance(request, str) else request
    method, url = line.split(" ", 1)
    answer = client.request(method, url, **options)

    def stable(text: str) -> str:
        for volatile in (r"127\.0\.0\.1:\d+", *getattr(module, "VOLATILE", ())):
            text = re.sub(volatile, "...", text)
        return text

    names = ("content-type", "location", *getattr(module, "HEADERS", ()))
    headers = {name: stable(answer.headers[name]) for name in names if name in answer.headers}
    return [line, answer.status_code, stable(answer.text), headers, sorted(client.cookies.keys())]


if __name__ == "__main__":
    try:
        print(MARK + json.dumps(answers_of(sys.argv[1], int(sys.argv[2]))))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # agents of some packages would wait for their servers
