"""The requests that `ingress trace` sends: over HTTP, with a limit of concurrent requests."""

from __future__ import annotations

import http.client
import re
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request to send. `body` is sent as JSON, unless it is empty."""

    method: str
    path: str
    body: str = ""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request. `status` is 0 if the connection was cut."""

    wanted: Wanted
    status: int


def wanted(text: str) -> Wanted:
    """Read "/path", "POST /path" or "POST /path {body}". Raises `ValueError` for anything else."""
    found = re.fullmatch(r"(?:([A-Za-z]+)\s+)?(/\S*)(?:\s+(.+))?", text.strip(), re.DOTALL)
    method = (found[1] or "GET").upper() if found is not None else ""
    if found is None or method not in METHODS:
        raise ValueError(
            f"{text!r} is not a request; write a path such as /items, or a method and a path and, "
            'if there is one, the body: \'POST /items {"name": "pen"}\''
        )
    return Wanted(method, found[2], found[3] or "")


def ask(url: str, requests: Sequence[Wanted], concurrency: int, answers: list[Answer]) -> None:
    """Send requests in order, `concurrency` at a time, and append the answers to a list."""
    left = deque(requests)

    def work() -> None:
        while True:
            try:
                each = left.popleft()
            except IndexError:
                return
            answers.append(Answer(each, _status(url, each)))

    threads = [
        # Daemons: a thread that reads an endless stream must not block a Ctrl-C.
        threading.Thread(target=work, name=f"ingress-client-{number}", daemon=True)
        for number in range(min(concurrency, len(left)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _status(url: str, wanted: Wanted) -> int:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port)
    headers = {"content-type": "application/json"} if wanted.body else {}
    path = quote(wanted.path, safe="/?&=%+,:;@!$'()*~[]")
    try:
        connection.request(wanted.method, path, wanted.body.encode() or None, headers)
        response = connection.getresponse()
        response.read()
        return response.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
