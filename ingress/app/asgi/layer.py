"""Middleware that a user has put around a bound application, as a layer of its app.

    wrapped = CORSMiddleware(Api.bind(), allow_origins=["*"])       ingress run main:wrapped

Each replica has its own copies of the layers, which share the attributes of the user's objects, as
with `app.add_middleware`.
"""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from ingress.core.base.foreign import dict_of, sharing, slots_of

_DEPTH = 20


class Layer:
    """One layer in front of an app: `attribute` of `around` is the app that it calls."""

    def __init__(self, app: ASGIApp, around: Any, attribute: str) -> None:
        self.app: ASGIApp = sharing(around, {attribute: app})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def layers_around(found: object, kind: type, depth: int = _DEPTH) -> list[tuple[object, str]]:
    """Return the objects around the one of a kind, the outermost first, with their attributes.

    The list is empty if there is none, or more than one. No code of the objects runs.
    """
    own = {**dict_of(found), **{slot.__name__: each for slot, each in slots_of(found)}}
    ways = []
    for name, each in own.items():
        if isinstance(each, kind):
            ways.append([(found, name)])
        elif depth and callable(each) and not isinstance(each, type):
            inner = layers_around(each, kind, depth - 1)
            ways += [[(found, name), *inner]] if inner else []
    return ways[0] if len(ways) == 1 else []
