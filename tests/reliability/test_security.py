"""The attack surface: addresses and paths that can be reached from outside."""

from __future__ import annotations

import json
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.programs import INGRESS, ROOT, ServerProcess, environment, process
from tests.reliability.figures import Figures
from tests.reliability.malformed import corpus
from tests.reliability.test_input import FRAMES, MULTIPARTS, close_code, odd_requests, sent, serving
from tests.servers import get

pytestmark = pytest.mark.slow


def listeners(pid: int) -> list[str]:
    """Return the addresses that a process listens on, as the kernel writes them."""
    folder = Path(f"/proc/{pid}/fd")
    mine = set()
    for each in folder.iterdir():
        try:
            mine |= set(re.findall(r"socket:\[(\d+)\]", str(each.readlink())))
        except FileNotFoundError:  # closed meanwhile
            continue
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in mine and (fields[3] == "0A" or table.startswith("udp")):
                found.append(fields[1].partition(":")[0])
    return found


@pytest.mark.reliability("S01")
def test_only_the_server_and_the_admin_listener_listen_and_both_on_loopback(
    figures: Figures, tmp_path: Path
) -> None:
    most = 0
    for name in ("hello", "composition", "multiplexed", "batched_model", "streams", "processes"):
        target = f"app_examples.{name}:{'hello' if name == 'hello' else 'app'}"
        command = [*INGRESS, "run", target, "--port", "0", "--app-dir", str(ROOT)]
        for options, expected in (([], 2), (["--admin", "off"], 1)):
            with process([*command, *options], tmp_path, environment(tmp_path)) as server:
                server.wait_for("is ready")
                found = listeners(server.process.pid)
                assert found == ["0100007F"] * expected, (name, options, found)
                most = max(most, len(found))

    figures.at_most("listening sockets", most, 2)


VERBS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW"]
BUILT_IN = [f"/-/{name}" for name in ("healthz", "routes", "metrics", "shutdown", "")]
BUILT_IN += ["/api/serve/applications/"]
FROM = {
    "": "Host: 127.0.0.1\r\n",
    "a foreign origin": "Host: 127.0.0.1\r\nOrigin: http://evil.example\r\n",
    "a foreign site": "Host: 127.0.0.1\r\nSec-Fetch-Site: cross-site\r\n",
    "another host": "Host: evil.example\r\n",
    "a proxy": "Host: 127.0.0.1\r\nX-Forwarded-For: 1.2.3.4\r\n",
}


@pytest.mark.reliability("S02")
def test_nothing_over_http_changes_anything(figures: Figures, tmp_path: Path) -> None:
    def state(server: ServerProcess) -> list[bytes]:
        return [
            get(server.port, path).body
            for path in ("/-/healthz", "/-/routes", "/", "/openapi.json")
        ]

    with serving(tmp_path) as server:
        before, count, told = state(server), 0, 0
        for verb in VERBS:
            for path in BUILT_IN:
                for headers in FROM.values():
                    raw = f"{verb} {path} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n"
                    (status, *more), closed = sent(server, raw.encode())
                    assert closed
                    assert not more
                    is_foreign = headers in (FROM["another host"], FROM["a proxy"])
                    told += status == 200 and path == "/-/routes" and is_foreign
                    if path in ("/-/healthz", "/-/routes"):  # the method is ignored
                        assert status in (200, 400, 403, 404, 405), (verb, path, headers, status)
                    else:
                        assert status in (400, 403, 404, 405), (verb, path, headers, status)
                    count += 1
        after = state(server)

    figures.note("requests", count)
    figures.at_most("routes told to other hosts and through proxies", told, 0)
    assert before == after


@pytest.mark.reliability("S03")
def test_no_byte_of_a_client_is_unpickled_compiled_imported_or_run(
    figures: Figures, tmp_path: Path
) -> None:
    raws = [*corpus().values(), *odd_requests().values(), *MULTIPARTS.values()]
    pickled = (
        b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."
    )
    head = f"Host: a\r\nConnection: close\r\nContent-Length: {len(pickled)}\r\n\r\n"
    paths = ("/echo", "/kind", "/upload", "/-/healthz")
    raws += [f"POST {path} HTTP/1.1\r\n{head}".encode() + pickled for path in paths]

    def replay(server: ServerProcess) -> None:
        for raw in raws:
            with_end = raw.replace(b"Host: here\r\n", b"Host: here\r\nConnection: close\r\n")
            sent(server, with_end)
        for raw, _ in FRAMES.values():
            close_code(server, raw)

    with serving(tmp_path) as server:
        replay(server)  # modules that are imported at their first use
        get(server.port, "/watch")
        replay(server)
        events = json.loads(get(server.port, "/events").body)

    print(events[:10])
    figures.note("malformed requests replayed", len(raws) + len(FRAMES))
    figures.at_most("audit events", len(events), 0)


FLOORS = {"starlette": (1, 3, 1), "h11": (0, 16), "fastapi": (0, 133), "uvicorn": (0, 51)}


@pytest.mark.reliability("S11")
def test_dependencies_have_floors_above_their_known_holes(figures: Figures) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    floors = dict(
        re.findall(r"^([a-z]+).*>=([\d.]+)", line)[0] for line in declared if ">=" in line
    )

    assert numbers(floors["starlette"]) >= FLOORS["starlette"]
    for name, floor in FLOORS.items():
        assert numbers(version(name)) >= floor
        figures.note(name, version(name))


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(".") if each.isdigit())
