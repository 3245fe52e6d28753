"""The least that a request costs in another process: an ASGI function here, and the same there.

There is no framework, no limit and no error handling, only what any server must do that has user
code in a child: a pickle each way over a socket pair, with uvloop at both ends.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
from functools import partial
from typing import Any

import uvloop

ANSWER = 200, [(b"content-length", b"5")], b"hello"
NUMBER = 8  # bytes of a call's number, in front of its pickle
ROOM = 1 << 16


async def here(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await _live(receive, send)
    else:
        await _respond(send, *ANSWER)


async def _live(receive: Any, send: Any) -> None:
    for phase in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{phase}.complete"})


async def _respond(send: Any, status: int, headers: Any, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Child:
    """The process that answers. Owned by the loop of the server."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.answers: dict[int, asyncio.Future[Any]] = {}
        self.last = 0
        self.end, other = socket.socketpair()
        self.end.setblocking(False)
        command = [sys.executable, "-m", __name__, str(other.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[other.fileno()])
        other.close()
        self.loop.add_reader(self.end, self.read)

    async def ask(self, *question: Any) -> Any:
        self.last += 1
        answer = self.answers[self.last] = self.loop.create_future()
        self.end.send(self.last.to_bytes(NUMBER) + pickle.dumps(question, 5))
        return await answer

    def read(self) -> None:
        # One connection has one call on its way, so there is one frame.
        frame = self.end.recv(ROOM)
        self.answers.pop(int.from_bytes(frame[:NUMBER])).set_result(pickle.loads(frame[NUMBER:]))

    def close(self) -> None:
        self.loop.remove_reader(self.end)
        self.end.close()  # which ends the process
        self.process.wait()


_children: list[Child] = []


async def there(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        _children.append(Child())
        await _live(receive, send)
        _children.pop().close()
    else:
        asked = _children[0].ask(scope["method"], scope["path"], scope["headers"])
        await _respond(send, *await asked)


def read(loop: asyncio.AbstractEventLoop, end: socket.socket) -> None:
    frame = end.recv(ROOM)
    if not frame:
        os._exit(0)  # the server has ended

    async def work(question: bytes) -> None:
        pickle.loads(question)
        end.send(frame[:NUMBER] + pickle.dumps(ANSWER, 5))

    loop.create_task(work(frame[NUMBER:]))


if __name__ == "__main__":
    loop = uvloop.new_event_loop()
    end = socket.socket(fileno=int(sys.argv[1]))
    end.setblocking(False)
    loop.add_reader(end, partial(read, loop, end))
    loop.run_forever()
