"""The differences between both renderings of random programs.

    python -m tests.differential.compare COUNT [--first SEED] [--flags 011] [--processes | --server]

`--flags` are the digits of sync in threadpool, user code in separate thread, router in separate
loop; without it, one combination after the other gets the same share of the programs.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ingress.core.base.settings import (
    ROUTER_IN_SEPARATE_LOOP,
    SYNC_IN_THREADPOOL,
    USER_CODE_IN_SEPARATE_THREAD,
)
from tests.differential.asking import answers, over_sockets
from tests.differential.programs import Program, program

SECRET = "SECRET-OF"

LISTED_REFUSALS = {
    "in doubt": "is a dependency in the body of",
    "endpoint without self": "must have ``self`` as their first argument",
}
"""The refusals of programs that plain FastAPI serves, each by its rule, with words of its error."""


class Plain:
    """The process that answers for plain renderings."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.differential.plain"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def ask(self, seed: int) -> None:
        assert self._process.stdin is not None
        print(seed, file=self._process.stdin, flush=True)

    def answers(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def answers_of(made: Program, folder: str, *, options: str = "") -> Any:
    """Return the answers of the class rendering, or the text of the error that refuses it."""
    import ingress as serve

    name = f"program_{made.seed}_{len(os.listdir(folder))}"
    served = (
        f"\nimport ingress as serve\napi = serve.deployment({options})(serve.ingress(app)(Api))\n"
    )
    text = made.text(plain=False) + served
    Path(folder, f"{name}.py").write_text(text)
    try:
        module = importlib.import_module(name)
        return answers(module.api.bind(), made)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        serve.shutdown()
        sys.modules.pop(name, None)


def answers_of_server(made: Program, folder: str) -> Any:
    """Return the answers of `ingress run` over a socket, or its output if it does not start."""
    name = f"program_{made.seed}"
    served = "\nimport ingress as serve\napi = serve.deployment(serve.ingress(app)(Api)).bind()\n"
    Path(folder, f"{name}.py").write_text(made.text(plain=False) + served)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ingress", "run", f"{name}:api", "--app-dir", folder]
    with tempfile.TemporaryFile("w+") as output:
        server = subprocess.Popen(
            [*command, "--port", str(port), "--admin", "off"], stdout=output, stderr=output
        )
        try:
            return over_sockets(f"127.0.0.1:{port}", made)
        except Exception as error:
            output.seek(0)
            return f"{type(error).__name__}: {error}; {output.read()}"
        finally:
            server.terminate()
            server.wait(30)


def differences(ours: Any, plain: Any) -> Iterator[str]:
    """Yield the differences of two lists of answers, and each open guard and leaked instance."""
    if SECRET in json.dumps(ours):
        yield "LEAK: the instance is in an answer"
    if isinstance(ours, str) or isinstance(plain, str):
        if ours != plain:
            yield f"ours: {str(ours)[:300]}; plain: {str(plain)[:300]}"
        return
    for (what, mine), (_, theirs) in zip(ours, plain, strict=True):
        if mine != theirs:
            is_open = what != "schema" and _is_open(mine[0], theirs[0])
            yield f"{'OPEN ' if is_open else ''}{what}: ours {_part(mine, theirs)}"


def _is_open(mine: Any, theirs: Any) -> bool:
    return bool(theirs[0] in (401, 403) and isinstance(mine[0], int) and mine[0] < 300)


def _part(mine: Any, theirs: Any) -> str:
    """Return both values, of two schemas only where they begin to differ."""
    one, two = json.dumps(mine, sort_keys=True), json.dumps(theirs, sort_keys=True)
    at = next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), 0)
    start = max(at - 60, 0)
    return f"...{one[start : at + 160]}, plain ...{two[start : at + 160]}"


def refusal_of(answer: Any) -> str | None:
    """Return the listed rule by which a program is refused, `None` if it is not."""
    if not isinstance(answer, str):
        return None
    return next((rule for rule, words in LISTED_REFUSALS.items() if words in answer), None)


@contextmanager
def flags_set(digits: str) -> Iterator[None]:
    names = (SYNC_IN_THREADPOOL, USER_CODE_IN_SEPARATE_THREAD, ROUTER_IN_SEPARATE_LOOP)
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(zip(names, digits, strict=True))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def compare(
    seeds: range,
    flags: list[str],
    *,
    options: str = "",
    over_socket: bool = False,
    report: Any = print,
) -> tuple[int, Counter[str]]:
    """Return the number of programs with differences, and the number of refusals by their rule."""
    bad, refused = 0, Counter[str]()
    with ExitStack() as open_things:
        folder = open_things.enter_context(tempfile.TemporaryDirectory())
        sys.path.insert(0, folder)
        open_things.callback(sys.path.remove, folder)
        plain = open_things.enter_context(Plain())
        for number, seed in enumerate(seeds):
            if number and number % 500 == 0:
                report(f"{number} programs, {bad} with differences")
            plain.ask(seed)  # both work at the same time
            with flags_set(flags[number % len(flags)]):
                ours = (
                    answers_of_server(program(seed), folder)
                    if over_socket
                    else answers_of(program(seed), folder, options=options)
                )
            theirs = plain.answers()
            if isinstance(theirs, str):
                refused["not by plain FastAPI either"] += 1
                continue
            if rule := refusal_of(ours):
                refused[rule] += 1
                continue
            if found := list(differences(ours, theirs)):
                bad += 1
                report(f"seed {seed}, flags {flags[number % len(flags)]}:")
                for each in found[:4]:
                    report(f"    {each}")
    return bad, refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--flags", default="")
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--server", action="store_true")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    all_flags = ["".join(each) for each in itertools.product("01", repeat=3)]
    options = "isolation='process'" if given.processes else ""
    seeds, began = range(given.first, given.first + given.count), time.monotonic()
    flags = [given.flags] if given.flags else all_flags
    bad, refused = compare(seeds, flags, options=options, over_socket=given.server)
    took = time.monotonic() - began
    told = ", ".join(f"{rule}: {count}" for rule, count in refused.items()) or "none"
    print(f"{given.count} programs in {took:.0f} s, {bad} with differences; refused: {told}")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
