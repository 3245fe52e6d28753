"""`ingress run --reload --keep MODULE`: changed code in the process that has the loaded objects."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ingress.core.base.settings import RUNTIME_DIR
from tests.programs import (
    INGRESS,
    ServerProcess,
    environment,
    ingress_run,
    process,
    said_by,
    write_module,
)
from tests.servers import get, wait_until

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs Unix")

MODELS = """
import ingress as serve
import vocabulary

class Weights:
    pass

WEIGHTS = Weights()
APPS = []

@serve.deployment
class Model:
    def __init__(self, size):
        self.size = size

    async def __call__(self, weights):
        return [id(WEIGHTS), id(self), isinstance(weights, Weights), self.size]
"""
MAIN = """
import os
import ingress as serve
import models
from fastapi import FastAPI
from words import WORD

app = FastAPI()

@serve.deployment
@serve.ingress(app)
class Api:
    def __init__(self, model):
        self.model = model

    @app.get("/")
    async def root(self):
        return ["v1", WORD, os.getpid(), await self.model.remote(models.WEIGHTS)]

hello = Api.bind(models.Model.bind(1))
"""
KEEP = ["--reload", "--keep", "models", "--no-access-log"]


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a server of its own folder, which has a short path: it has a socket."""
    files = {"models": MODELS, "main": MAIN, "words": "WORD = 'one'", "vocabulary": "SIZE = 1"}
    for name, source in files.items():
        write_module(tmp_path, name, source)
    with tempfile.TemporaryDirectory() as folder:
        yield {**environment(tmp_path), RUNTIME_DIR: folder}


def change(folder: Path, name: str, *changes: tuple[str, str]) -> None:
    """Write a module anew, as an editor does, with these replacements."""
    path = folder / f"{name}.py"
    text = path.read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def answer(server: ServerProcess) -> Any:
    """Return what the application answers, `None` while it starts."""
    try:
        return json.loads(get(server.port, "/").body)
    except (OSError, ValueError):
        return None


def word(server: ServerProcess) -> object:
    return (answer(server) or [None])[0]


def serves(server: ServerProcess, version: str) -> bool:
    return word(server) == version


def test_changed_code_serves_beside_the_objects_and_the_replicas_that_are_kept(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    with ingress_run(tmp_path, "main:hello", *KEEP, environ=environ) as it:
        it.wait_for("Ctrl-C to stop")
        before = answer(it)
        assert before[:2] == ["v1", "one"]
        assert before[3][2:] == [True, 1]

        change(tmp_path, "main", ("v1", "v2"))
        wait_until(lambda: answer(it) == ["v2", *before[1:]])
        it.wait_for(r"reloaded main in 0\.\d+ s")
        change(tmp_path, "words", ("one", "two"))  # another module, which that one imports
        wait_until(lambda: answer(it) == ["v2", "two", *before[2:]])
        it.wait_for("reloaded main, words in")

        change(tmp_path, "main", ("bind(1)", "bind(2)"))  # other arguments: another replica
        wait_until(lambda: answer(it)[3][3] == 2)
        _, _, pid, (weights, replica, *_) = answer(it)
        assert (pid, weights) == (before[2], before[3][0])
        assert replica != before[3][1]

        change(tmp_path, "main", ("v2", "v3"), ("\nhello", "\ndef broken(:\nhello"))
        it.wait_for(r"main\.py(.|\n)*SyntaxError(.|\n)*the code before serves on")
        change(tmp_path, "main", ("def broken(:", "no_such_name"))
        it.wait_for(r"main\.py(.|\n)*NameError(.|\n)*the code before serves on")
        change(tmp_path, "main", ("no_such_name", "raise KeyboardInterrupt"))
        it.wait_for(r"main\.py(.|\n)*KeyboardInterrupt\nnot reloaded")
        (tmp_path / "words.py").unlink()
        it.wait_for(r"cannot read .*words\.py: No such file or directory\nnot reloaded")
        write_module(tmp_path, "words", "WORD = 'two'")
        change(tmp_path, "main", ("raise KeyboardInterrupt", ""), ("\nhello =", "\nhallo ="))
        it.wait_for(r"no attribute 'hello'; it has hallo\nnot reloaded")
        change(tmp_path, "main", ("hallo", "hello"), ("= model\n", "= model; 1 / 0\n"))
        it.wait_for("deployment 'Api' failed to start: ZeroDivisionError")
        assert answer(it)[:3] == ["v2", "two", pid]
        change(tmp_path, "main", ("; 1 / 0", ""))
        wait_until(lambda: answer(it) == ["v3", "two", pid, [weights, replica, True, 2]])
        assert "restarts" not in it.output


@pytest.mark.timeout(150)
def test_a_change_that_reaches_what_is_kept_restarts_and_says_why(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    with ingress_run(tmp_path, "main:hello", *KEEP, environ=environ) as it:
        it.wait_for("Ctrl-C to stop")
        pid = answer(it)[2]

        def restarted(reason: str) -> None:
            nonlocal pid
            it.wait_for(f"restarts: {reason}\n")
            wait_until(lambda: (answer(it) or [0, 0, pid])[2] != pid)
            pid = answer(it)[2]

        change(tmp_path, "models", ("APPS = []", "APPS = {}"))
        restarted("models, which is kept, changed")
        change(tmp_path, "vocabulary", ("1", "2"))
        restarted("vocabulary changed, and models, which is kept, needs vocabulary")

        change(tmp_path, "main", ("app = FastAPI()", "app = models.APPS.setdefault(0, FastAPI())"))
        wait_until(lambda: "reloaded main in" in it.output)
        change(tmp_path, "main", ("v1", "v2"))
        restarted("main changed, and models, which is kept, needs main")
        assert word(it) == "v2"
        change(tmp_path, "main", ("models.APPS.setdefault(0, FastAPI())", "FastAPI()"))
        restarted("main changed, and models, which is kept, needs main")

        write_module(tmp_path, "plugin", "NAME = 'p1'")
        named = "\nname = importlib.import_module('plugin').NAME\nhello"
        change(
            tmp_path,
            "main",
            ("\nimport os", "\nimport importlib, os"),
            ('"v2"', "name"),
            ("\nhello", named),
        )
        wait_until(lambda: word(it) == "p1")
        change(tmp_path, "plugin", ("p1", "p2"))
        restarted("plugin changed, and it is not known which module imports it")
        assert word(it) == "p2"

        thread = "poll = threading.Thread(target=lambda: threading.Event().wait(), name='poll')"
        change(
            tmp_path,
            "words",
            ("WORD", f"import threading\n{thread}\npoll.daemon = True\npoll.start()\nWORD"),
        )
        it.wait_for("reloaded main, words in")
        change(tmp_path, "models", ("APPS = {}", "APPS = []"))
        restarted("models, which is kept, changed")
        change(tmp_path, "main", ("importlib, os", "os, importlib"))  # the thread is another's
        wait_until(lambda: it.output.count("reloaded main in") >= 3)
        change(tmp_path, "words", ("'one'", "'two'"))
        restarted("poll, a thread that words has started, runs its old code")


REGISTRY = """
NAMES = set()

def register(name):
    if name in NAMES:
        raise ValueError(f"{name} is already defined")
    NAMES.add(name)
"""
FILE = """
http_options: {port: 0}
applications:
- {name: shop, import_path: "main:hello"}
"""


@pytest.mark.timeout(150)
def test_replicas_in_processes_run_the_new_code_and_a_file_restarts(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    (tmp_path / "serve.yaml").write_text(FILE)
    libraries = tmp_path / "site-packages"  # in the eyes of the server, an installed package
    libraries.mkdir()
    write_module(libraries, "registry", REGISTRY)
    environ["PYTHONPATH"] += f"{os.pathsep}{libraries}"
    change(tmp_path, "main", ("@serve.deployment", '@serve.deployment(isolation="process")'))
    command = [*INGRESS, "run", "serve.yaml", *KEEP]
    with process(command, tmp_path, environ) as it:
        it.wait_for("Ctrl-C to stop")
        before = answer(it)
        change(tmp_path, "main", ("v1", "v2"))
        wait_until(lambda: word(it) == "v2")
        after = answer(it)
        assert after[2] != before[2]
        assert after[3] == before[3]

        change(tmp_path, "words", ("WORD", "import registry\nregistry.register('word')\nWORD"))
        it.wait_for("reloaded main, words in")
        change(tmp_path, "words", ("'one'", "'two'"))
        it.wait_for("restarts: ValueError: word is already defined\n")
        wait_until(lambda: (answer(it) or [0, 0])[1] == "two")
        after = answer(it)
        (tmp_path / "serve.yaml").write_text(FILE.replace("shop", "store"))
        it.wait_for("restarts: serve.yaml changed\n")
        wait_until(lambda: answer(it) not in (None, after))


@pytest.mark.timeout(150)
def test_a_process_that_stays_has_no_class_of_a_changed_module(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    change(
        tmp_path,
        "models",
        ("@serve.deployment", '@serve.deployment(isolation="process")'),
        ("[id(WEIGHTS), id(self), isinstance(weights, Weights), self.size]", "repr(weights)"),
    )
    change(tmp_path, "main", ("models.WEIGHTS", "1"))
    with ingress_run(tmp_path, "main:hello", *KEEP, environ=environ) as it:
        it.wait_for("Ctrl-C to stop")
        kind = "class Point(NamedTuple):\n    x: int = 1\n"
        change(
            tmp_path,
            "main",
            ("\nimport os", f"\nimport os\nfrom typing import NamedTuple\n{kind}"),
            ("remote(1)", "remote(Point())"),
        )
        it.wait_for("reloaded main in")  # the process has not imported it yet
        wait_until(lambda: answer(it)[3] == "Point(x=1)")
        change(tmp_path, "main", ("x: int = 1", "x: int = 1\n    y: int = 2"))
        it.wait_for("restarts: Model#0, a process, has imported main\n")
        wait_until(lambda: (answer(it) or [None])[-1] == "Point(x=1, y=2)")


COUNT = """
models.MARKERS.add(Marker)

def count():
    SEEN.inc()
    gc.collect()
    assert b"kept_total 0.0" in generate_latest()
    return len(models.MARKERS)

hello"""


@pytest.mark.timeout(150)
def test_metrics_and_old_modules_do_not_gather(tmp_path: Path, environ: dict[str, str]) -> None:
    change(
        tmp_path,
        "main",
        ("\nimport os", "\nimport gc, os\nfrom prometheus_client import Counter, generate_latest"),
        ("from words import WORD", "from words import WORD\nfrom models import KEPT"),
        (
            "\napp =",
            "\nSEEN = Counter('seen', 'Requests')\nclass Marker: pass\napp =",
        ),
        (
            '    @app.get("/")',
            '    @app.get("/old")\n    def old(self): return count()\n\n    @app.get("/")',
        ),
        ("\nhello", COUNT),
    )
    counter = "import prometheus_client\nKEPT = prometheus_client.Counter('kept', 'Loads')\n"
    markers = "import weakref\nMARKERS = weakref.WeakSet()\n"
    change(tmp_path, "models", ("APPS = []", f"{counter}{markers}APPS = []"))
    with ingress_run(tmp_path, "main:hello", *KEEP, environ=environ) as it:
        it.wait_for("Ctrl-C to stop")
        assert word(it) == "v1"
        assert int(get(it.port, "/old").body) == 1
        for number in range(1, 51):
            change(tmp_path, "main", (f"v{number}", f"v{number + 1}"))
            wait_until(partial(serves, it, f"v{number + 1}"))
        # Old instances go with their replicas.
        wait_until(lambda: int(get(it.port, "/old").body) <= 3)
        assert "restarts" not in it.output


REFUSED = {
    "--keep models": "--keep models is for a server that reloads its code: add --reload",
    "--reload --keep model": "imports no module of this name; did you mean models",
    "--reload --keep x": "it imports main, models, vocabulary, words",
    "--reload --keep json": "it is no module of your files, and stays anyway",
    "--reload --keep main": "main has the application, so its code is the code to reload",
}


def test_a_module_that_cannot_be_kept_is_refused_with_the_way_to_write_it(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    commands = [["run", "main:hello", *each.split()] for each in REFUSED]
    for (code, _, err), problem in zip(said_by(tmp_path, *commands), REFUSED.values(), strict=True):
        assert code == 1
        assert problem in err[-1]
