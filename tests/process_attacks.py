"""Frames by chance, from children to their server: `make test-processes` sends many.

python -m tests.process_attacks 2000
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import ingress as serve
from ingress.exceptions import RayServeException
from tests.process_attacks_app import named
from tests.process_kills import differs, held
from tests.servers import PATIENCE_S, wait_until

AT_ONCE = 20
_BYSTANDER = "bystander"
_CHANCE = "chance"


def asked(handle: Any, method: str, *arguments: Any) -> Any:
    """Return the answer of a call."""
    return getattr(handle, method).remote(*arguments).result(timeout_s=PATIENCE_S)


def is_as_before(before: dict[str, Any]) -> bool:
    """Return whether this process holds no more than it held before."""
    now = held()
    return not any(differs(before[each], now[each]) for each in before)


def attacked_by_chance(seeds: Iterable[int]) -> Counter[str]:
    """Have a child for each seed send some frames, all at once; return what became of them.

    Fails if another child, or the server's state, shows an effect.
    """
    names = [str(each) for each in seeds]
    serve.run(named([*names, _BYSTANDER]), name=_CHANCE, route_prefix=None)
    handles = {each: serve.get_deployment_handle(each, _CHANCE) for each in (*names, _BYSTANDER)}
    before = {name: asked(each, "pid") for name, each in handles.items()}
    idle = held()
    bystander = handles[_BYSTANDER].wait.remote()

    calls = [handles[each].attack.remote(os.getpid(), each) for each in names]
    wait_until(lambda: all(_serves(handles[each]) for each in names))
    for each in calls:
        each.cancel()
    after = {each: asked(handles[each], "pid") for each in names}

    serve.status()
    asked(handles[_BYSTANDER], "end_wait")
    assert bystander.result(timeout_s=PATIENCE_S) == before[_BYSTANDER]
    wait_until(lambda: is_as_before(idle))
    serve.delete(_CHANCE)
    return Counter("goes on" if after[each] == before[each] else "replaced" for each in names)


def _serves(handle: Any) -> bool:
    """Return whether a replica answers, after its child's attack may have answered for it."""
    try:
        return isinstance(asked(handle, "pid"), int)
    except RayServeException:
        return False


def main(count: int = 2000, first: int = 0) -> None:
    begun, outcomes = time.monotonic(), Counter[str]()
    for start in range(first, first + count, AT_ONCE):
        seeds = range(start, min(start + AT_ONCE, first + count))
        try:
            outcomes += attacked_by_chance(seeds)
        except BaseException:
            print(f"{seeds}, {held()}")
            raise
    print(f"{count} attacks, {time.monotonic() - begun:.0f} s: {dict(outcomes)}")


if __name__ == "__main__":
    os.environ.setdefault("INGRESS_START_METHOD", "forkserver")
    main(*map(int, sys.argv[1:]))
