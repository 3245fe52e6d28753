"""Bytes that no client should send: their answers, and that no other client is affected."""

from __future__ import annotations

import json
import os
import re
import struct
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from websockets.sync.client import connect

from ingress.core.base.settings import BODY_IDLE_TIMEOUT_S, HEADER_TIMEOUT_S
from tests.programs import INGRESS, UVICORN, ServerProcess, environment, process
from tests.reliability.figures import Figures
from tests.reliability.malformed import corpus
from tests.servers import UPGRADE, Connection, get

pytestmark = pytest.mark.slow

H11 = [
    *INGRESS[:-1],
    "import sys; sys.modules['httptools'] = None; from ingress.cli.commands import main; main()",
]
PARSERS = {"httptools": INGRESS, "h11": H11}
REFUSED = {400, 408, 413, 414, 431, 501, 505}
HANGS_S = 12.0


@contextmanager
def serving(folder: Path, command: list[str] = INGRESS) -> Iterator[ServerProcess]:
    """Serve `input_app`, and check that it still serves at the end."""
    target = "tests.reliability.input_app"
    run = [*command, f"{target}:plain"] if command is UVICORN else None
    run = run or [*command, "run", f"{target}:app", "--port", "0"]
    environ = environment(folder) | {HEADER_TIMEOUT_S: "2", BODY_IDLE_TIMEOUT_S: "5"}
    with process(run, folder, environ) as server:
        server.wait_for("is ready|Application startup complete")
        yield server
        assert get(server.port, "/").body == b'"here"'


def sent(server: ServerProcess, raw: bytes) -> tuple[list[int], bool]:
    """Send bytes; return the statuses of the answers, and whether the connection was closed."""
    with Connection(server.port) as connection:
        connection.socket.settimeout(HANGS_S)
        try:
            connection.send(raw)
            received = connection.receive_all()
        except TimeoutError:
            return statuses(connection.received), False
        except ConnectionError:
            received = connection.received
    return statuses(received), True


def statuses(raw: bytes) -> list[int]:
    return [int(each) for each in re.findall(rb"HTTP/1\.[01] (\d{3}) ", raw)]


def tried(server: ServerProcess) -> dict[str, tuple[list[int], bool]]:
    raws = corpus()
    with ThreadPoolExecutor(16) as threads:
        answers = threads.map(lambda raw: sent(server, raw), raws.values())
        return dict(zip(raws, answers, strict=True))


def accepted(found: dict[str, tuple[list[int], bool]]) -> list[str]:
    return [name for name, (each, _) in found.items() if any(status < 400 for status in each)]


@pytest.mark.reliability("C02", "F08")
@pytest.mark.parametrize("parser", PARSERS)
def test_malformed_http_is_refused_and_cut(figures: Figures, tmp_path: Path, parser: str) -> None:
    with serving(tmp_path, PARSERS[parser]) as server:
        found = tried(server)
    with serving(tmp_path, UVICORN) as server:
        plain = len(accepted(tried(server))) if parser == "httptools" else None

    figures.note("malformed requests", len(found))
    answers = found.values()
    hang = [name for name, (each, closed) in found.items() if not closed and not each]
    figures.at_most(f"open without an answer after 12 s, {parser}", len(hang), 0)
    figures.at_most("more than one answer", sum(len(each) > 1 for each, _ in answers), 0)
    errors = [s for each, _ in answers for s in each if s >= 500 and s not in REFUSED]
    figures.at_most("5xx", len(errors), 0)
    taken = accepted(found)
    figures.at_most(f"accepted by {parser}", len(taken), 0, plain=plain)
    print("accepted:", taken, "hang:", hang, Counter(str(each) for each, _ in answers))


ODD = {
    "NaN": "NaN", "Infinity": "Infinity", "-Infinity": "-Infinity", "1e999": "1e999",
    "-1e999": "-1e999", "5,000 digits": "9" * 5_000, "100,000 deep": "[" * 100_000,
    "100,000 deep and closed": "[" * 100_000 + "]" * 100_000, "a lone surrogate": '"\\ud800"',
    "NUL": '"\\u0000"', "a key twice": '{"a": 1, "a": 2}', "a BOM": "\ufeff1", "cut off": '{"a": ',
    "nothing": "", "a word": "word", "a number with _": "1_0", "a number of others": "\u0661",
}  # fmt: skip
UTF_16 = {name: text.encode("utf-16", "surrogatepass") for name, text in ODD.items()}


def odd_requests() -> dict[str, bytes]:
    """Return requests with each oddity at each place of a request."""
    found: dict[str, bytes] = {}
    for name, text in ODD.items():
        for path in ("/kind", "/number"):
            bodies = {"UTF-8": text.encode(), "UTF-16": UTF_16[name]}
            for coding, body in bodies.items():
                head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                found[f"{name} as {coding} to {path}"] = head.encode() + body
        value = "".join(f"%{byte:02x}" for byte in text[:5_000].encode())
        for path in (f"/query?value={value}", f"/path/{value}"):
            line = f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
            found[f"{name} in {path[:6]}"] = line.encode()
        raw = text[:5_000].encode().replace(b"\n", b"")
        found[f"{name} in a header"] = (
            b"GET /header HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX-Value: " + raw + b"\r\n\r\n"
        )
    return found


@pytest.mark.reliability("C07")
def test_odd_numbers_and_text_are_never_an_error_of_ours(figures: Figures, tmp_path: Path) -> None:
    def answers(server: ServerProcess) -> tuple[dict[str, list[int]], float]:
        found, slowest_s = {}, 0.0
        for name, raw in odd_requests().items():
            began = time.monotonic()
            found[name], is_closed = sent(server, raw)
            assert is_closed, name
            slowest_s = max(slowest_s, time.monotonic() - began)
        return found, slowest_s

    with serving(tmp_path) as server:
        ours, slowest_s = answers(server)
    with serving(tmp_path, UVICORN) as server:
        plain, _ = answers(server)

    figures.note("odd requests", len(ours))
    failed = [name for name, each in ours.items() if any(status >= 500 for status in each)]
    theirs = [name for name, each in plain.items() if any(status >= 500 for status in each)]
    print("5xx:", failed)
    figures.note("5xx of FastAPI's own, which cannot tell what is wrong", len(theirs))
    figures.at_most("5xx of ours", len({*failed} - {*theirs}), 0)
    other = {name: (each, plain[name]) for name, each in ours.items() if each != plain[name]}
    print("differ:", other)
    figures.at_most("answered otherwise than by plain FastAPI", len(other), 0)
    figures.at_most("slowest, s", slowest_s, 1)


def frame(opcode: int, payload: bytes, *, final: bool = True, masked: bool = True) -> bytes:
    """Return a WebSocket frame; its mask is zero."""
    size = len(payload)
    head = bytes([0x80 * final | opcode])
    mark = 0x80 * masked
    if size < 126:
        head += bytes([mark | size])
    elif size < 65536:
        head += bytes([mark | 126]) + struct.pack("!H", size)
    else:
        head += bytes([mark | 127]) + struct.pack("!Q", size)
    return head + (bytes(4) if masked else b"") + payload


FRAMES: dict[str, tuple[bytes, set[int]]] = {
    "not masked": (frame(1, b"hello", masked=False), {1002}),
    "text that is no UTF-8": (frame(1, b"\xff\xfe"), {1007}),
    "a reserved opcode": (frame(3, b"x"), {1002}),
    "reserved bits": (bytes([0xF1, 0x81]) + bytes(4) + b"x", {1002}),
    "a fragment of nothing": (frame(0, b"x"), {1002}),
    "a ping of two frames": (frame(9, b"x", final=False), {1002}),
    "a ping of 126 bytes": (frame(9, b"x" * 126), {1002}),
    "a close of one byte": (frame(8, b"x"), {1002}),
    "a close with code 1005": (frame(8, struct.pack("!H", 1005)), {1002}),
    "a close with code 0": (frame(8, struct.pack("!H", 0)), {1002}),
    "a close whose reason is no UTF-8": (frame(8, struct.pack("!H", 1000) + b"\xff"), {1007, 1002}),
    "17 MiB": (frame(1, b"x" * (17 * 2**20)), {1009}),
    "17 MiB in fragments": (
        frame(1, b"", final=False) + frame(0, b"x" * 2**20, final=False) * 17,
        {1009},
    ),
}


def close_code(server: ServerProcess, raw: bytes) -> int:
    """Send frames over a WebSocket and return the code it is closed with; 1006 for none."""
    with Connection(server.port) as connection:
        connection.request("/ws", headers=UPGRADE)
        connection.receive_until(b"\r\n\r\n")
        connection.received = b""
        try:
            connection.send(raw)
        except ConnectionError:
            pass
        received = connection.receive_all()
    closes = re.findall(rb"\x88[\x02-\x7d](..)", received, re.DOTALL)
    return struct.unpack("!H", closes[-1])[0] if closes else 1006


@pytest.mark.reliability("C11")
def test_malformed_websockets_are_closed_with_the_right_code(
    figures: Figures, tmp_path: Path
) -> None:
    with serving(tmp_path) as server:
        url = f"ws://127.0.0.1:{server.port}/ws"
        wrong = {}
        with connect(url, proxy=None) as beside:
            for name, (raw, codes) in FRAMES.items():
                code = close_code(server, raw)
                if code not in codes:
                    wrong[name] = code
                beside.send("still here")
                assert beside.recv(timeout=5) == "still here"
        with Connection(server.port) as flooding:
            flooding.request("/ws", headers=UPGRADE)
            flooding.receive_until(b"\r\n\r\n")
            flooding.send(frame(9, b"ping") * 20_000 + frame(1, b"after"))
            flooding.receive_until(b"\x81\x05after")
        to_http, _ = sent(server, f"GET / HTTP/1.1\r\nHost: a\r\n{UPGRADE}\r\n".encode())
        to_ws, _ = sent(server, b"GET /ws HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")

    print("wrong:", wrong)
    figures.note("malformed conversations", len(FRAMES))
    figures.at_most("closed with another code than RFC 6455's", len(wrong), 0)
    assert to_http[0] in (200, 400, 403, 404, 426), to_http
    assert to_ws[0] in (400, 404, 426), to_ws


def multipart(parts: bytes, boundary: str = "; boundary=b") -> bytes:
    head = (
        f"POST /upload HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(parts)}\r\n"
    )
    return f"{head}Content-Type: multipart/form-data{boundary}\r\n\r\n".encode() + parts


PART = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n'
FIELD = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\nx\r\n'
MULTIPARTS = {
    "10,000 fields": multipart(FIELD * 10_000 + b"--b--\r\n"),
    "10,000 files": multipart((PART + b"\r\nx\r\n") * 10_000 + b"--b--\r\n"),
    "no boundary": multipart(PART + b"\r\nx\r\n--b--\r\n", ""),
    "another boundary": multipart(PART + b"\r\nx\r\n--b--\r\n", "; boundary=c"),
    "a boundary of 100 KiB": multipart(b"", f"; boundary={'b' * 50_000}"),
    "a header of 1 MB": multipart(PART + b"X: " + b"x" * 10**6 + b"\r\n\r\nx\r\n--b--\r\n"),
    "no name": multipart(b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n"),
    "never ended": multipart(PART + b"\r\nx"),
    "no disposition": multipart(b"--b\r\n\r\nx\r\n--b--\r\n"),
}


@pytest.mark.reliability("C13")
def test_malformed_multipart_and_ranges_are_a_4xx(figures: Figures, tmp_path: Path) -> None:
    ranges = ",".join(f"{at}-{at + 1}" for at in range(0, 400, 4))
    many = f"GET /file HTTP/1.1\r\nHost: a\r\nConnection: close\r\nRange: bytes={ranges}\r\n\r\n"
    raws = MULTIPARTS | {
        "100 ranges": many.encode(),
        "a range that is none": many.encode().replace(b"0-1", b"9-1"),
    }
    with serving(tmp_path) as server:
        before = descriptors(server)
        cpu_s = 0.0
        became = {}
        for name, raw in raws.items():
            began = server.cpu_s
            became[name], is_closed = sent(server, raw)
            assert is_closed, name
            cpu_s = max(cpu_s, server.cpu_s - began)
        time.sleep(0.2)
        left = descriptors(server) - before

    print(became)
    figures.note("malformed bodies and ranges", len(raws))
    failed = [name for name, each in became.items() if not each or each[0] >= 500]
    figures.at_most("5xx, or no answer", len(failed), 0)
    accepted = [name for name, each in became.items() if each and each[0] < 300]
    print("accepted:", accepted)
    figures.at_most("processor time of the longest, s", cpu_s, 1)
    figures.at_most("descriptors and temporary files left", len(left), 0)


def descriptors(server: ServerProcess) -> set[str]:
    folder = Path(f"/proc/{server.process.pid}/fd")
    return {os.readlink(each) for each in folder.iterdir() if "tmp" in os.readlink(each)}


NASTY = [
    "\x1b[31mred", "a\rb", "a\nb", "a\r\nINFO: forged", "\u2028forged", "\u0085forged", "%0aforged",
    "${jndi:ldap://x}", "%s%s%n", "\0", "\x9b31m", "x" * 20_000,
]  # fmt: skip


@pytest.mark.reliability("S05")
def test_what_a_client_sends_cannot_forge_a_line_of_the_log(
    figures: Figures, tmp_path: Path
) -> None:
    with serving(tmp_path) as server:
        before = len(server.output)
        count = 0
        for nasty in NASTY:
            encoded = "".join(f"%{byte:02x}" for byte in nasty.encode())
            for path in (f"/nowhere/{encoded}", f"/query?value={encoded}", f"/path/{encoded}"):
                get(server.port, path)
                count += 1
            if nasty.isprintable():
                headers = "".join(
                    f"{name}: {nasty}\r\n"
                    for name in ("x-request-id", "serve_multiplexed_model_id", "user-agent")
                )
                get(server.port, "/", headers)
                count += 1
            get(server.port, f"/fails?{encoded}")
            count += 1
        lines = server.output[before:].split("\n")

    forged = [line for line in lines if line.lstrip().startswith(("forged", "INFO: forged"))]
    figures.note("requests", count)
    figures.at_most("lines forged", len(forged), 0)
    raw = [line for line in lines if re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028]", line)]
    print([line[:200] for line in raw[:5]])
    figures.at_most("lines with control characters", len(raw), 0)
    figures.at_most("longest line, KiB", max(map(len, lines)) / 1024, 4)


@pytest.mark.reliability("S06")
@pytest.mark.parametrize("parser", PARSERS)
def test_what_a_handler_echoes_cannot_split_a_response(
    figures: Figures, tmp_path: Path, parser: str
) -> None:
    split = 0
    with serving(tmp_path, PARSERS[parser]) as server:
        for where in ("header", "cookie", "redirect", "raw", "name"):
            for value in ("%0d%0ax-evil:%201", "%0ax-evil:%201", "%0dx-evil:%201", "a%00b"):
                with Connection(server.port) as connection:
                    connection.request(f"/out?where={where}&value={value}")
                    raw = connection.receive_all()
                lines = re.split(rb"\r\n|\r|\n", raw.partition(b"\r\n\r\n")[0])
                split += any(line.lower().startswith(b"x-evil") for line in lines)
                split += len(statuses(raw)) > 1 or b"\0" in raw
        assert json.loads(get(server.port, "/events").body) == []

    figures.note(f"echoes through {parser}", 20)
    figures.at_most(f"responses split by {parser}", split, 0)
