"""Arguments of calls by handle that cannot be pickled are named before the call is sent.

Ray itself would send the call again and again, or fail it with an error of the unpickling.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import islice
from typing import Any
from weakref import WeakSet

from ray import cloudpickle

from ingress.core.base.types import RequestMetadata
from ingress.exceptions import RayServeException
from ingress.handle import Invocation
from ingress.telemetry.mistakes import described

_PLAIN = frozenset({bool, bytes, float, int, str, type(None)})
_COLLECTIONS = frozenset({dict, frozenset, list, set, tuple})
ITEMS_CHECKED = 32  # of a collection
DEPTH = 4

_sent: WeakSet[type] = WeakSet()
"""Types of which an object has been pickled and unpickled. Others are tried once: 10 us each."""


def check_arguments(metadata: RequestMetadata, invocation: Invocation) -> None:
    """Raise `TypeError`, with the name or the number of the argument, if one cannot be pickled."""
    for number, value in enumerate(invocation.args):
        for each in _of_new_types(value, DEPTH):
            _check(each, str(number + 1), metadata)
    for name, value in invocation.kwargs.items():
        for each in _of_new_types(value, DEPTH):
            _check(each, repr(name), metadata)


def _of_new_types(value: Any, depth: int) -> Iterator[object]:
    """Yield the value, or the parts of a collection, whose types were not tried yet."""
    if (kind := type(value)) in _PLAIN:
        return
    if kind in _COLLECTIONS:
        if depth:
            for each in islice(value.values() if kind is dict else value, ITEMS_CHECKED):
                yield from _of_new_types(each, depth - 1)
    elif kind not in _sent and not kind.__module__.startswith("ray."):
        yield value  # Ray's own references are pickled in its context only


def _check(value: object, name: str, metadata: RequestMetadata) -> None:
    buffers: list[pickle.PickleBuffer] = []  # so that large arrays are not copied
    try:
        data = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        pickle.loads(data, buffers=buffers)
    except RayServeException:  # a response says what to do with it
        raise
    except Exception as problem:
        raise TypeError(
            f"argument {name} of {metadata.deployment.name}.{metadata.method_name} is or contains "
            f"a {type(value).__name__}, which cannot be pickled for another process "
            f"({described(problem)}); pass the values that the method needs of it"
        ) from None
    _sent.add(type(value))
