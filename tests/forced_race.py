"""Two threads give one request attributes at the same moment: `python -m tests.forced_race KIND`.

It forces a race of CPython 3.11. In a class whose shared keys are full, the first new attribute
builds a dict. Building it may collect garbage; a weak reference's callback then lets the other
thread run, which builds a second dict over the same values. One of the two dicts frees them.

It runs in a separate process, because on 3.11 the process ends with a segmentation fault if `KIND`
has a dict.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import sys
import threading
import time
import weakref
from typing import Any

from ingress.core.base.types import DeploymentID, RequestMetadata
from ingress.core.calls.call import Call
from ingress.serving.http.reply import Reply
from ingress.serving.http.work import HTTPWork
from ingress.serving.replicas.router import Router

ROUNDS = 50
DEPLOYMENT = DeploymentID("A", "default")

# Two attributes: the threads of the server's loop and of the user loop, or of both, write them.
FIELDS = {"Call": ("is_interrupted", "is_awaited"), "HTTPWork": ("_template", "has_answer")}


class Node:
    """A reference cycle, which only the collector can free."""

    me: Node


def make(kind: str) -> Call | HTTPWork:
    metadata = RequestMetadata("id", DEPLOYMENT, route="/")
    unused: Any = None
    reply = Reply(metadata, Router(DEPLOYMENT), {"type": "http"}, unused, unused)
    return reply.work if kind == "HTTPWork" else reply.call


async def race(kind: str) -> None:
    ours, theirs = FIELDS[kind]
    go, done = threading.Semaphore(0), threading.Semaphore(0)
    box = [make(kind)]
    kept: list[object] = []

    def user_loop() -> None:
        while True:
            go.acquire()
            time.sleep(0.001)
            setattr(box[0], theirs, True)
            done.release()

    for _ in range(200):  # each instance uses up one of the class's shared keys
        setattr(make(kind), theirs, None)
    setattr(make(kind), ours, None)  # the last one
    threading.Thread(target=user_loop, daemon=True).start()
    gc.disable()
    gc.set_threshold(1)
    for number in range(ROUNDS):
        written = box[0] = make(kind)
        node = Node()
        node.me = node
        kept.append(weakref.ref(node, lambda _: time.sleep(0.005)))
        del node
        kept.extend({} for _ in range(100))
        go.release()
        gc.enable()
        setattr(written, ours, True)
        gc.disable()
        done.acquire()
        assert (getattr(written, ours), getattr(written, theirs)) == (True, True), number
    print("survived", ROUNDS)


if __name__ == "__main__":
    faulthandler.enable()
    asyncio.run(race(sys.argv[1]))
