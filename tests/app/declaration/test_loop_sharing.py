"""`loop="own"` and `loop="shared"`, and the objects of user code that belong to one event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import httpx
import pytest
from fastapi import Depends, FastAPI

import ingress as serve
from app_examples import slow_server
from ingress.app.declaration.build import build
from ingress.app.declaration.loop_objects import loop_objects
from ingress.check.checker import check_application
from ingress.core.base.settings import USER_CODE_IN_SEPARATE_THREAD, Settings
from tests.documents import blocks
from tests.servers import ROOT, Answer, bind, get, served, write_module

HEAD = """
import asyncio, functools, os
from contextlib import asynccontextmanager
from typing import Annotated
import httpx, opaque
import ingress as serve
from collections import defaultdict, deque
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.staticfiles import StaticFiles
from starlette.middleware.cors import CORSMiddleware

@asynccontextmanager
async def nothing(app):
    yield

class Middleware:
    def __init__(self, app, lock=None):
        self.app = app
    async def __call__(self, scope, receive, send):
        await self.app(scope, receive, send)
"""

CLASS = """
@serve.deployment(num_replicas=2)
class A:
    async def __call__(self, request):
        {}
"""

APP = """
@serve.deployment(num_replicas=2)
@serve.ingress(app)
class A:
    @app.get("/")
    async def get(self{}):
        return 1
"""

PLAIN = "@serve.deployment\n@serve.ingress(app)\nclass A: pass\n"

# Name -> the module, and the object that is found in it; the text of its line, if that
# does not have its name.
REACHED: dict[str, tuple[str, ...]] = {
    "a global": ("lock = asyncio.Lock()" + CLASS.format("await lock.acquire()"), "lock"),
    "a global, in an inner function": (
        "lock = asyncio.Lock()" + CLASS.format("await (lambda: lock.acquire())()"),
        "lock",
    ),
    "a part of a global": (
        "class Database:\n    def __init__(self): self.clients = {'a': httpx.AsyncClient()}\n"
        "db = Database()" + CLASS.format("return db"),
        "db.clients['a']",
        "db = ",
    ),
    "a global of a function that is called": (
        "queue = asyncio.Queue()\ndef put(): queue.put_nowait(1)" + CLASS.format("put()"),
        "queue",
    ),
    "a global of a method that is called": (
        "event = asyncio.Event()\nclass Shop:\n    def wait(self): return event.wait()\n"
        "shop = Shop()" + CLASS.format("await shop.wait()"),
        "event",
    ),
    "a class attribute": (CLASS.format("pass") + "    lock = asyncio.Lock()\n", "A.lock"),
    "a class attribute of a base": (
        "class Base: limit = asyncio.Semaphore(2)\n@serve.deployment\nclass A(Base): pass\n",
        "Base.limit",
    ),
    "a closure": (
        "def make():\n    client = httpx.AsyncClient()\n    async def get(): return client\n"
        "    return get\nget = make()" + CLASS.format("await get()"),
        "make.<locals>.get.client",
        "def make",
    ),
    "a partial": ("get = functools.partial(print, asyncio.Lock())" + CLASS.format("get()"), "get"),
    "a global that start-up sets": (
        "client = None\napp = FastAPI()\nasync def connect():\n    global client\n"
        "    client = httpx.AsyncClient()\napp.router.on_startup.append(connect)" + APP.format(""),
        "client",
    ),
    "an attribute that the lifespan sets": (
        "class Database: client = None\ndb = Database()\n@asynccontextmanager\n"
        "async def lifespan(app):\n    db.client = httpx.AsyncClient()\n    yield\n"
        "app = FastAPI(lifespan=lifespan)" + APP.format(""),
        "db.client",
        "db = ",
    ),
    "an attribute that a method of a global sets": (
        "class Database:\n    async def connect(self): self.client = httpx.AsyncClient()\n"
        "db = Database()\n@asynccontextmanager\n"
        "async def lifespan(app):\n    await db.connect()\n    yield\n"
        "app = FastAPI(lifespan=lifespan)" + APP.format(""),
        "db.client",
        "db = ",
    ),
    "a part of a global that a function sets": (
        "class Cache:\n    def __init__(self): self.lock = asyncio.Lock()\n"
        "cache = None\ndef shared():\n    global cache\n    cache = cache or Cache()\n"
        "    return cache" + CLASS.format("await shared().lock.acquire()"),
        "cache",
        "cache = None",
    ),
    "the result of a cached function": (
        "@functools.lru_cache\ndef client():\n    return httpx.AsyncClient()\napp = FastAPI()"
        + APP.format(", client=Depends(client)"),
        "client()",
    ),
    "a dependency": (
        "lock = asyncio.Lock()\nasync def locked():\n    async with lock:\n        yield\n"
        "app = FastAPI()" + APP.format(", _: Annotated[None, Depends(locked)] = None"),
        "lock",
    ),
    "a dependency of a router": (
        "lock = asyncio.Lock()\nasync def locked():\n    await lock.acquire()\n"
        "router = APIRouter(dependencies=[Depends(locked)])\n"
        "@router.get('/other')\nasync def other(): pass\n"
        "app = FastAPI()\napp.include_router(router)" + APP.format(""),
        "lock",
    ),
    "an argument of a middleware": (
        "lock = asyncio.Lock()\napp = FastAPI()\napp.add_middleware(Middleware, lock=lock)"
        + APP.format(""),
        "lock",
    ),
    "the app's state": (
        "app = FastAPI()\napp.state.client = httpx.AsyncClient()" + APP.format(""),
        "app.state.client",
        "app = FastAPI",
    ),
    "a mounted app": (
        "lock = asyncio.Lock()\ninner = FastAPI()\n@inner.get('/')\nasync def get():\n"
        "    await lock.acquire()\napp = FastAPI()\napp.mount('/inner', inner)" + APP.format(""),
        "lock",
    ),
    "an ASGI function": (
        "lock = asyncio.Lock()\nasync def app(scope, receive, send): await lock.acquire()\n"
        + PLAIN,
        "lock",
    ),
    "an ASGI app of a library": ("app = opaque.App()\n" + PLAIN, "app"),
    "a mounted app of a library": (
        "app = FastAPI(lifespan=nothing)\napp.mount('/inner', opaque.App())" + APP.format(""),
        "app.mount('/inner')",
        "app = ",
    ),
    "a mounted app of a library, in a middleware and a router": (
        "inner = FastAPI()\ninner.mount('/app', CORSMiddleware(opaque.App()))\n"
        "app = FastAPI()\napp.mount('/inner', inner)" + APP.format(""),
        "app.mount('/app')",
        "app = ",
    ),
    "another module": ("import other\n" + CLASS.format("await other.lock.acquire()"), "lock"),
    "imported from another module": (
        "from other import lock as mine\n" + CLASS.format("await mine.acquire()"),
        "mine",
        "lock = ",
    ),
}

# How a request fills a container -> the module, and the text of the container's line.
FILLED: dict[str, tuple[str, ...]] = {
    "setdefault": (
        "locks = {}" + CLASS.format("await locks.setdefault(1, asyncio.Lock()).acquire()"),
        "locks",
    ),
    "an item": ("locks = {}" + CLASS.format("locks[request] = asyncio.Lock()"), "locks"),
    "add, by a variable": (
        "queues = set()" + CLASS.format("queue = asyncio.Queue(); queues.add(queue)"),
        "queues",
    ),
    "add, in an inner function": (
        "queues = set()" + CLASS.format("queue = asyncio.Queue(); (lambda: queues.add(queue))()"),
        "queues",
    ),
    "append, in a tuple": (
        "queues = deque()" + CLASS.format("queues.append((1, asyncio.Queue()))"),
        "queues",
    ),
    "append, in an object": (
        "class Client:\n    def __init__(self, queue): self.queue = queue\nclients = []"
        + CLASS.format("clients.append(Client(asyncio.Queue()))"),
        "clients",
    ),
    "an operator": (
        "queues = set()" + CLASS.format("global queues; queues |= {asyncio.Queue()}"),
        "queues",
    ),
    "a container in a container": (
        "rooms = defaultdict(set)" + CLASS.format("rooms[1].add(asyncio.Queue())"),
        "rooms",
    ),
    "a container that setdefault makes": (
        "rooms = {}" + CLASS.format("rooms.setdefault(1, set()).add(asyncio.Queue())"),
        "rooms",
    ),
    "a factory": (
        "locks = defaultdict(asyncio.Lock)" + CLASS.format("await locks[1].acquire()"),
        "locks",
    ),
    "a factory, a function": (
        "locks = defaultdict(lambda: asyncio.Lock())" + CLASS.format("await locks[1].acquire()"),
        "locks",
    ),
    "a future": (
        "waiting = {}" + CLASS.format("waiting[1] = asyncio.get_running_loop().create_future()"),
        "waiting",
    ),
    "an async generator": (
        "async def steps(): yield 1\nheld = {}" + CLASS.format("held[1] = steps()"),
        "held",
    ),
    "another module's": ("import other\n" + CLASS.format("other.held[1] = asyncio.Lock()"), "held"),
    "a global's, by a function": (
        "class Chat:\n    def __init__(self): self.queues = []\nchat = Chat()"
        + CLASS.format("chat.queues.append(asyncio.Queue())"),
        "chat.queues",
        "chat = ",
    ),
    "a global's, by its method": (
        "class Chat:\n    def __init__(self): self.queues = []\n"
        "    def join(self): self.queues.append(asyncio.Queue())\nchat = Chat()"
        + CLASS.format("chat.join()"),
        "chat.queues",
        "chat = ",
    ),
    "a class's, by self": (
        CLASS.format("self.queues.add(asyncio.Queue())") + "    queues = set()\n",
        "A.queues",
        "queues = ",
    ),
    "a class's, by its name": (
        "class Chat: queues = set()" + CLASS.format("Chat.queues.add(asyncio.Queue())"),
        "Chat.queues",
        "Chat: queues",
    ),
    "a closure's": (
        "def make():\n    queues = set()\n    async def join(): queues.add(asyncio.Queue())\n"
        "    return join\njoin = make()" + CLASS.format("await join()"),
        "make.<locals>.join.queues",
        "def make",
    ),
    "the app's state": (
        "app = FastAPI()\napp.state.queues = set()"
        + APP.format(", request: Request").replace(
            "return 1", "request.app.state.queues.add(asyncio.Queue())"
        ),
        "app.state.queues",
        "app = ",
    ),
}

NOT_FILLED = {
    "an answer": "cache = {}"
    + CLASS.format(
        "async with httpx.AsyncClient() as client: "
        "answer = await client.get('x'); cache[1] = answer.json()"
    ),
    "a task": "tasks = set()"
    + CLASS.format("tasks.add(asyncio.create_task(asyncio.sleep(1))); asyncio.Lock()"),
    "the request's own": CLASS.format("queues = []; queues.append(asyncio.Queue())"),
    "the replica's own": CLASS.format("self.queues.append(asyncio.Queue())")
    + "    queues = None\n    def __init__(self): self.queues = []\n",
    "one for each loop": "clients = {}"
    + CLASS.format("clients.setdefault(asyncio.get_running_loop(), httpx.AsyncClient())"),
    "one for each loop, by a variable": "clients = {}"
    + CLASS.format("loop = asyncio.get_running_loop(); clients[id(loop)] = httpx.AsyncClient()"),
    "the state that the lifespan makes": (
        "@asynccontextmanager\nasync def lifespan(app):\n    app.state.queues = set()\n    yield\n"
        "app = FastAPI(lifespan=lifespan)"
        + APP.format(", request: Request").replace(
            "return 1", "request.app.state.queues.add(asyncio.Queue())"
        )
    ),
    "a mounted app of the user's": (
        "async def inner(scope, receive, send): pass\napp = FastAPI()\napp.mount('/', inner)"
        + APP.format("")
    ),
    "static files": (
        "app = FastAPI()\napp.mount('/', StaticFiles(directory='.'))" + APP.format("")
    ),
}

NOT_REACHED = {
    "nothing": CLASS.format("pass"),
    "a global that no code names": "lock = asyncio.Lock()" + CLASS.format("pass"),
    "made in the constructor": CLASS.format("await self.lock.acquire()")
    + "    def __init__(self): self.lock = asyncio.Lock()\n",
    "made in the lifespan, for the app's state": (
        "@asynccontextmanager\nasync def lifespan(app):\n    app.state.lock = asyncio.Lock()\n"
        "    yield\napp = FastAPI(lifespan=lifespan)" + APP.format("")
    ),
    "made by each call": "def client(): return httpx.AsyncClient()"
    + CLASS.format("async with client(): pass"),
    "a part of what the constructor makes": (
        "class Cache:\n    def __init__(self): self.lock = asyncio.Lock()"
        + CLASS.format("await self.cache.lock.acquire()")
        + "    def __init__(self): self.cache = Cache()\n"
    ),
    "made by each call of a global's method": (
        "class Stock:\n    calls = 0\n    async def ask(self):\n"
        "        async with httpx.AsyncClient() as client: answer = await client.get('x')\n"
        "        self.calls += 1\n        return answer, Stock()\n"
        "stock = Stock()" + CLASS.format("await stock.ask()")
    ),
    "kept in what a global's method makes": (
        "class Ticket: pass\nclass Stock:\n    def ask(self):\n        ticket = Ticket()\n"
        "        ticket.done = asyncio.Event()\n        return ticket\n"
        "stock = Stock()" + CLASS.format("stock.ask()")
    ),
    "a sync client": "client = httpx.Client()" + CLASS.format("client"),
    "a thread's lock": "import threading\nlock = threading.Lock()" + CLASS.format("lock"),
}


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import a module with this source; `other` has a lock."""
    monkeypatch.syspath_prepend(tmp_path)
    write_module(tmp_path, "other", "import asyncio\n\nlock = asyncio.Lock()\nheld = {}\n")
    library = tmp_path / "site-packages"
    library.mkdir()
    monkeypatch.syspath_prepend(library)
    write_module(library, "opaque", "class App:\n    async def __call__(self, *_): pass\n")

    def load(source: str) -> ModuleType:
        write_module(tmp_path, "users", HEAD + source)
        module: ModuleType = __import__("users")
        return module

    yield load
    for name in ("users", "other", "opaque"):
        sys.modules.pop(name, None)


def found_in(application: serve.Application) -> list[Any]:
    (built,) = build(application, "default").deployments
    return [*loop_objects(built)]


def test_a_function_that_no_module_has_is_passed_over(load: Any) -> None:
    source = "def made(): pass\nmade.__module__ = None\nclient = httpx.AsyncClient()\n"
    module = load(source + CLASS.format("made, client"))

    assert [each.name for each in found_in(module.A.bind())] == ["client"]


@pytest.mark.parametrize("shape", REACHED)
def test_an_object_that_belongs_to_a_loop_is_found(load: Any, shape: str) -> None:
    source, name, *expected = REACHED[shape]
    (found,) = found_in(load(source).A.bind())

    assert found.name == name
    line = Path(found.file).read_text().splitlines()[found.line - 1]
    assert (expected or [name.partition("(")[0].rpartition(".")[2]])[0] in line


@pytest.mark.parametrize("shape", FILLED)
def test_a_container_that_requests_fill_is_found(load: Any, shape: str) -> None:
    source, name, *expected = FILLED[shape]
    (found,) = found_in(load(source).A.bind())

    assert found.name == name
    line = Path(found.file).read_text().splitlines()[found.line - 1]
    assert (expected or [f"{name} = "])[0] in line


@pytest.mark.parametrize(
    "source", [*NOT_REACHED.values(), *NOT_FILLED.values()], ids=[*NOT_REACHED, *NOT_FILLED]
)
def test_code_without_such_an_object_has_loops_of_its_own(load: Any, source: str) -> None:
    assert found_in(load(source).A.bind()) == []


def test_an_object_named_in_a_function_without_callers_is_found_with_it(load: Any) -> None:
    module = load(
        "lock = asyncio.Lock()\nasync def unused():\n    await lock.acquire()\n"
        + CLASS.format("return 1")
        + "    other = unused\n"
    )

    (found,) = found_in(module.A.bind())

    assert found.name == "lock"
    file, _, line = found.named_in.partition("(")[2].rstrip(")").rpartition(":")
    assert found.named_in.startswith("unused (")
    assert Path(file).read_text().splitlines()[int(line) - 1] == "async def unused():"


def test_a_constructor_argument_is_shared_by_all_replicas(load: Any) -> None:
    module = load(CLASS.format("pass") + "    def __init__(self, client): pass\n")

    (found,) = found_in(module.A.bind(client=httpx.AsyncClient()))

    assert (found.name, found.kind) == ("A.bind(client)", "httpx.AsyncClient")


def test_all_objects_are_found_in_one_walk(load: Any) -> None:
    module = load("lock, queue = asyncio.Lock(), asyncio.Queue()" + CLASS.format("lock, queue"))

    assert sorted(each.name for each in found_in(module.A.bind())) == ["lock", "queue"]


lock = asyncio.Lock()
client = httpx.AsyncClient()
semaphore = asyncio.Semaphore(1)
queue: asyncio.Queue[int] = asyncio.Queue(1)
url = ""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Replace the objects at module level, which belong to the loop of an earlier test."""
    global lock, client, semaphore, queue
    lock, client = asyncio.Lock(), httpx.AsyncClient()
    semaphore, queue = asyncio.Semaphore(1), asyncio.Queue(1)
    yield
    serve.shutdown()


async def others_come() -> None:
    """Hold what the caller holds for so long that other requests want it meanwhile."""
    await asyncio.sleep(0.001)


@serve.deployment(num_replicas=2)
class Locks:
    async def __call__(self, request: Any) -> str:
        async with lock, semaphore:
            await queue.put(1)
            await others_come()
            await queue.get()
        return where()


@serve.deployment(num_replicas=2)
class Locked:
    async def __call__(self, request: Any) -> str:
        async with lock:
            await others_come()
        return where()


@serve.deployment(num_replicas=2)
class Clients:
    async def __call__(self, request: Any) -> str:
        assert (await client.get(url)).text == "slow"
        return where()


@serve.deployment(num_replicas=2)
class Plain:
    async def __call__(self, request: Any) -> str:
        return where()


served_app = FastAPI()


@serve.deployment(num_replicas=2)
@serve.ingress(served_app)
class Served:
    @served_app.get("/")
    async def get(self) -> str:
        async with lock:
            await others_come()
        return where()


def where() -> str:
    loop = asyncio.get_running_loop()
    return f"{serve.get_replica_context().replica_id.unique_id} {id(loop)}"


def at_once(port: int, count: int = 24) -> list[Answer]:
    with ThreadPoolExecutor(count) as threads:
        return [*threads.map(lambda _: get(port, "/"), range(count))]


def answers(target: serve.Application, count: int = 24) -> list[list[str]]:
    """Send requests at once; return the replica and the loop of each, all of which must be 200."""
    found = at_once(served(target), count)
    assert [each.status for each in found] == [200] * count
    return [each.body.decode().split() for each in found]


def test_two_replicas_answer_with_asyncios_objects_at_module_level() -> None:
    found = answers(bind(Locks))

    assert {replica for replica, _ in found} == {"0", "1"}
    assert len({loop for _, loop in found}) == 1


def test_two_replicas_answer_with_one_client_at_module_level() -> None:
    global url
    with slow_server.running() as server:
        url = server.url
        found = answers(bind(Clients), 8)

    assert {replica for replica, _ in found} == {"0", "1"}
    assert len({loop for _, loop in found}) == 1


def test_two_deployments_share_one_loop_that_is_not_the_servers() -> None:
    @serve.deployment(loop="shared")
    async def other(request: Any) -> str:
        return f"{threading.current_thread().name} {where()}"

    ((name, _, loop),) = answers(bind(other), 1)
    assert name == "ingress-user"
    assert get(served(bind(Locks), "locks", "/locks"), "/locks").body.decode().split()[1] == loop


@pytest.mark.parametrize(("choice", "loops"), [("own", 2), ("shared", 1), (None, 2)])
def test_the_option_decides(choice: Any, loops: int) -> None:
    plain: Any = Plain
    found = answers(bind(plain.options(loop=choice)))

    assert len({loop for _, loop in found}) == loops


def test_own_loops_are_own_although_an_object_is_shared() -> None:
    own: Any = Locks
    handle = serve.run(bind(own.options(loop="own")), route_prefix=None)

    found = [handle.remote(None).result().split() for _ in range(20)]  # one after another
    assert len({loop for _, loop in found}) == len({replica for replica, _ in found}) == 2


def test_a_line_names_object_file_line_and_options(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ingress"):
        serve.run(bind(Locks), route_prefix=None)

    (line,) = [each.getMessage() for each in caplog.records if "belongs to" in each.getMessage()]
    lines = Path(__file__).read_text().splitlines()
    number = lines.index("lock = asyncio.Lock()") + 1  # at module level
    method = lines.index("class Locks:") + 2
    here = "tests/app/declaration/test_loop_sharing.py"
    assert line == (
        f"lock (asyncio.Lock, {here}:{number}) belongs to one event loop and "
        f"is named in Locks.__call__ ({here}:{method}), so the replicas of "
        "Locks run on the shared loop; declare this with "
        '@serve.deployment(loop="shared"), or give each replica its own loop with loop="own"'
    )


@pytest.mark.parametrize("choice", ["own", "shared"])
def test_a_line_says_that_a_limit_of_a_dependency_counts_for_each_loop(
    choice: Literal["own", "shared"], caplog: pytest.LogCaptureFixture
) -> None:
    if "max_concurrency" not in inspect.signature(Depends).parameters:
        pytest.skip("this FastAPI limits no dependencies")
    app = FastAPI()
    depends: Any = functools.partial(Depends, max_concurrency=3)

    @serve.deployment(num_replicas=2, loop=choice)
    @serve.ingress(app)
    class Limited:
        @app.get("/")
        async def endpoint(self, value: str = depends(where)) -> str:
            return value

    with caplog.at_level(logging.INFO, "ingress"):
        serve.run(Limited.bind(), route_prefix=None)

    lines = [text for each in caplog.records if "max_conc" in (text := each.getMessage())]
    assert len(lines) == (choice == "own")
    begin = "max_concurrency=3 of the dependency where counts for each event loop, so for each"
    assert all(each.startswith(f"{begin} of the 2 replicas of Limited;") for each in lines)


@pytest.mark.parametrize("choice", [None, "own", "shared"])
def test_user_code_on_the_servers_loop_stays_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, choice: Any
) -> None:
    monkeypatch.setenv(USER_CODE_IN_SEPARATE_THREAD, "0")
    with caplog.at_level(logging.INFO, "ingress"):
        locks: Any = Locks
        found = answers(bind(locks.options(loop=choice)))

    assert len({loop for _, loop in found}) == 1
    assert "belongs to" not in caplog.text


tables: list[str] = []


@serve.deployment(num_replicas=3)
class Creates:
    """Creates a table unless there is one, as `create_all` does."""

    async def __init__(self) -> None:  # type: ignore[misc]
        async with lock:
            found = [*tables]
        await asyncio.sleep(0)
        if not found:
            tables.append("users")

    async def __call__(self, request: Any) -> str:
        return where()


def test_the_first_replica_of_a_shared_loop_starts_alone() -> None:
    tables.clear()
    serve.run(bind(Creates), route_prefix=None)

    assert tables == ["users"]


def test_replicas_in_processes_share_no_loop() -> None:
    with pytest.raises(ValueError, match=r'loop="shared" is for replicas in threads'):
        serve.deployment(loop="shared", isolation="process")


def test_a_wrong_loop_is_refused_where_it_is_written() -> None:
    wrong: Any = "mine"
    with pytest.raises(ValueError, match="""loop must be "own", "shared" or None, got 'mine'"""):
        serve.deployment(loop=wrong)


@pytest.mark.parametrize("kind", ["function", "app"])
def test_an_error_about_another_loop_has_a_fix(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    target: Any = Locked if kind == "function" else Served
    port = served(bind(target.options(loop="own")))
    failed = [each for each in at_once(port) if each.status == 500]
    assert failed
    for each in failed:
        assert '@serve.deployment(loop="shared")' in each.body.decode()
    (first, *_) = [each for each in caplog.records if "another event loop" in str(each.exc_text)]
    assert "bound to a different event loop" in str(first.exc_text)


def test_an_error_of_another_kind_has_no_note(caplog: pytest.LogCaptureFixture) -> None:
    @serve.deployment
    async def fails(request: Any) -> None:
        raise RuntimeError("a different kind")

    answer = get(served(bind(fails)), "/")

    assert (answer.status, answer.body) == (500, b"Internal Server Error")
    assert "another event loop" not in caplog.text


CHECKED = """
import asyncio
import ingress as serve

lock = asyncio.Lock()
mine = asyncio.Lock()  # noqa: IG111

@serve.deployment({options})
class A:
    async def __call__(self, request):
        async with lock, mine:
            return 1

app = A.bind()
"""


def findings(folder: Path) -> list[Any]:
    app, settings = __import__("users").app, Settings.from_environment()
    return [*check_application(app, "users", folder, settings, migrate=False).findings]


@pytest.mark.parametrize(
    ("options", "lines"),
    {
        "num_replicas=2": [5],
        "": [],
        "num_replicas=2, loop='own'": [],
        "num_replicas=2, loop='shared'": [],
        "num_replicas=2, isolation='process'": [],
    }.items(),
)
def test_the_check_names_what_replicas_share(
    load: Any, tmp_path: Path, options: str, lines: list[int]
) -> None:
    write_module(tmp_path, "users", CHECKED.format(options=options))
    assert [(each.rule.id, each.path.name, each.line) for each in findings(tmp_path)] == [
        ("IG111", "users.py", line) for line in lines
    ]


def test_the_check_names_what_two_deployments_share(load: Any, tmp_path: Path) -> None:
    source = CHECKED.format(options="") + (
        "@serve.deployment\nclass B:\n    def __init__(self, a): pass\n"
        "    async def __call__(self, request): await lock.acquire()\napp = B.bind(app)\n"
    )
    write_module(tmp_path, "users", source)

    (found,) = findings(tmp_path)
    assert "the replicas of A and B share a loop" in found.message


def test_only_the_first_code_of_the_rules_page_is_found(load: Any, tmp_path: Path) -> None:
    wrong, right = [text for _, text in blocks(ROOT / "docs/rules/IG111.md")]
    found = {}
    for name, source in (("wrong", wrong), ("right", right)):
        write_module(tmp_path, name, f"import httpx\nimport ingress as serve\n{source}")
        app = __import__(name).Shop.bind()
        report = check_application(app, name, tmp_path, Settings.from_environment(), migrate=False)
        found[name] = [each.line for each in report.findings]
        del sys.modules[name]

    marked = wrong.splitlines().index("client = httpx.AsyncClient()  # IG111")
    assert found == {"wrong": [marked + 3], "right": []}


PAGE = [text for language, text in blocks(ROOT / "docs/async-objects.md") if language == "python"]


@pytest.mark.parametrize("source", PAGE, ids=["constructor", "lifespan", "module", "loop"])
def test_each_pattern_of_the_page_answers_with_two_replicas(load: Any, source: str) -> None:
    write_module(Path(sys.path[0]), "users", source)
    port = served(__import__("users").app)

    assert [each.status for each in at_once(port)] == [200] * 24
