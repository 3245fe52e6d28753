"""Requests that are not HTTP, or whose end is ambiguous; each must be refused and closed."""

from __future__ import annotations

HOST = b"Host: here\r\n"
LINE = b"POST /echo HTTP/1.1\r\n"
CHUNKED = LINE + HOST + b"Transfer-Encoding: chunked\r\n\r\n"


def lines() -> dict[str, bytes]:
    """Return malformed request lines."""
    named = {
        "no target": b"GET",
        "no version": b"GET /",
        "version 9.9": b"GET / HTTP/9.9",
        "version 2.0": b"GET / HTTP/2.0",
        "version 1": b"GET / HTTP/1",
        "version 1.1x": b"GET / HTTP/1.1x",
        "version in lower case": b"GET / http/1.1",
        "another protocol": b"GET / FTP/1.1",
        "something after the version": b"GET / HTTP/1.1 x",
        "a space in the target": b"GET /a b HTTP/1.1",
        "a tab in the target": b"GET /a\tb HTTP/1.1",
        "NUL in the target": b"GET /a\0b HTTP/1.1",
        "DEL in the target": b"GET /a\x7fb HTTP/1.1",
        "NUL in the method": b"G\0T / HTTP/1.1",
        "a bracket in the method": b"GE(T / HTTP/1.1",
        "a space before the method": b" GET / HTTP/1.1",
        "a method of one kilobyte": b"G" * 1024 + b" / HTTP/1.1",
        "a carriage return in the line": b"GET /\r HTTP/1.1",
        "HTTP/2 begins": b"PRI * HTTP/2.0",
        "TLS begins": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        "SSH begins": b"SSH-2.0-OpenSSH_9.0",
        "binary": bytes(range(128, 256)),
    }
    return {name: line + b"\r\n" + HOST + b"\r\n" for name, line in named.items()}


def fields() -> dict[str, bytes]:
    """Return malformed header fields."""
    named = {
        "no colon": b"Name value",
        "a space before the colon": b"Name : value",
        "no name": b": value",
        "a line that goes on": b"Name: a\r\n b",
        "a carriage return in a value": b"Name: a\rb",
        "Host twice": b"Host: there",
    }
    named |= {
        f"{char!r} in a name": b"Na" + char.encode() + b"me: value" for char in '(),/;<=>?@[\\]{}"'
    }
    named |= {
        f"{number:#04x} in a name": b"Na%cme: value" % number
        for number in (0, 1, 9, 11, 31, 127, 255)
    }
    named |= {
        f"{number:#04x} in a value": b"Name: a%cb" % number
        for number in (*range(9), 11, 12, *range(14, 32), 127)
    }
    return {
        name: b"GET / HTTP/1.1\r\n" + HOST + field + b"\r\n\r\n" for name, field in named.items()
    }


def hosts() -> dict[str, bytes]:
    named = {
        "no Host": b"",
        "a space in Host": b"Host: a b\r\n",
        "a slash in Host": b"Host: a/b\r\n",
        "a user in Host": b"Host: a@b\r\n",
        "a comma in Host": b"Host: a,b\r\n",
    }
    return {name: b"GET / HTTP/1.1\r\n" + host + b"\r\n" for name, host in named.items()}


def lengths() -> dict[str, bytes]:
    """Return bodies of an ambiguous length."""
    values = [
        b"-1",
        b"+5",
        b"5 5",
        b"0x5",
        b"5,6",
        b"1_0",
        b"5.0",
        b"five",
        b"",
        b"9" * 30,
        b"\xb2",
    ]
    named = {f"length {value!r}": b"Content-Length: " + value + b"\r\n" for value in values}
    named |= {
        "two lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n",
        "length and chunked": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "chunked and length": b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
    }
    codings = [
        b"xchunked", b"chunked, gzip", b"chunked, chunked", b"gzip", b"\x0bchunked", b"chunked\x0b",
        b"identity", b"chunked;q=1", b"\"chunked\"", b"",
    ]  # fmt: skip
    named |= {f"coding {value!r}": b"Transfer-Encoding: " + value + b"\r\n" for value in codings}
    found = {name: LINE + HOST + field + b"\r\nhello" for name, field in named.items()}
    found["chunked in HTTP/1.0"] = CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n"
    return found


def chunks() -> dict[str, bytes]:
    """Return malformed chunked bodies."""
    named = {
        "no number": b"g\r\nhello\r\n0\r\n\r\n",
        "negative": b"-5\r\nhello\r\n0\r\n\r\n",
        "with 0x": b"0x5\r\nhello\r\n0\r\n\r\n",
        "empty": b"\r\nhello\r\n0\r\n\r\n",
        "with a sign": b"+5\r\nhello\r\n0\r\n\r\n",
        "with _": b"0_5\r\nhello\r\n0\r\n\r\n",
        "with a space before": b" 5\r\nhello\r\n0\r\n\r\n",
        "greater than 64 bits": b"F" * 17 + b"\r\nhello\r\n0\r\n\r\n",
        "ended by LF": b"5\nhello\r\n0\r\n\r\n",
        "longer than it says": b"5\r\nhello!\r\n0\r\n\r\n",
        "shorter than it says": b"5\r\nhell\r\n0\r\n\r\n",
        "a trailer without a colon": b"5\r\nhello\r\n0\r\ntrailer\r\n\r\n",
    }
    return {f"chunk {name}": CHUNKED + body for name, body in named.items()}


def corpus() -> dict[str, bytes]:
    """Return all malformed requests by name."""
    bare = {"lines that end in LF": b"GET / HTTP/1.1\nHost: here\n\n"}
    return lines() | fields() | hosts() | lengths() | chunks() | bare
