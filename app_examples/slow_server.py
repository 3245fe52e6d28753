"""A slow web server on this machine, for the HTTP examples.

    python -m app_examples.slow_server

    curl http://127.0.0.1:8001/    "slow", after a second

The examples read its address from `SLOW_SERVER_URL`, by default http://127.0.0.1:8001/.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


def url() -> str:
    """Return the address of the slow server."""
    return os.environ.get("SLOW_SERVER_URL", "http://127.0.0.1:8001/")


class SlowServer(ThreadingHTTPServer):
    """Answers each GET once `wait()` has returned; by default after a second."""

    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], wait: Callable[[], object] = lambda: time.sleep(1)
    ):
        super().__init__(address, SlowHandler)
        self.wait = wait

    @property
    def url(self) -> str:
        return f"http://{self.server_name}:{self.server_port}/"

    def server_bind(self) -> None:
        super().server_bind()
        self.server_name = str(self.server_address[0])  # avoids a DNS look-up


class SlowHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, SlowServer)
        self.server.wait()
        body = b"slow"
        self.send_response(200)
        self.send_header("content-type", "text/plain")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the client knows of its request."""


@contextmanager
def running(wait: Callable[[], object] = lambda: time.sleep(1)) -> Iterator[SlowServer]:
    """Run a slow server on a free port of 127.0.0.1."""
    with SlowServer(("127.0.0.1", 0), wait) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="slow-server")
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def main() -> None:
    """Serve on the address of `url()` until Ctrl-C."""
    address = urlsplit(url())
    with SlowServer((address.hostname or "127.0.0.1", address.port or 80)) as server:
        print(f"Slow server on {url()} (Ctrl-C to stop)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
