"""IG103 to IG107: code that a `def` may run on an event loop, but not in a thread; settings of all.

    asyncio.create_task(...), self.loop.call_soon(...), self.event.set()    IG103
    an `async def` below a decorator that returns a `def`                   IG104
    return self._predict_async(x)                                           IG105
    self.db = sqlite3.connect(...) in the constructor, used in a method     IG106
    os.environ["PORT"] = "1" in the constructor                             IG107

`subjects`, which follows decorators, finds IG104.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from ingress.check.races import Unsafe
from ingress.check.sources import Function, Sources, callee, dotted, own_nodes
from ingress.check.state import Made, State, state_around

_NEEDS_LOOP = {
    *("all_tasks", "create_task", "current_task", "ensure_future", "gather", "get_event_loop"),
    *("get_running_loop", "shield", "timeout", "timeout_at", "Future"),
}
_LOOP_MAKERS = {"get_event_loop", "get_running_loop", "new_event_loop"}
_LOOP_NAMES = {"loop", "_loop", "event_loop", "_event_loop"}
_LOOP_METHODS = {
    *("add_reader", "add_signal_handler", "add_writer", "call_at", "call_later", "call_soon"),
    *("create_future", "create_task", "remove_reader", "remove_writer", "run_in_executor"),
}
_PRIMITIVES = {"Condition", "Event", "Future", "LifoQueue", "Lock", "PriorityQueue", "Queue"} | {
    *("BoundedSemaphore", "Semaphore", "TaskGroup"),
}
_PRIMITIVE_METHODS = {
    *("cancel", "clear", "create_task", "get_nowait", "notify", "notify_all", "put_nowait"),
    *("release", "set", "set_exception", "set_result"),
}
_AWAITABLES = {"asyncio.sleep", "asyncio.to_thread", "asyncio.wait", "asyncio.wait_for"}
_AFFINE = {
    "playwright.sync_api.sync_playwright": "a Playwright driver",
    "selenium.webdriver": "a browser driver",
    "sqlite3.connect": "a SQLite connection",
    "win32com.client": "a COM object",
}
_THREAD_STATE = {
    "decimal.getcontext": "decimal's context",
    "decimal.setcontext": "decimal's context",
    "numpy.seterr": "NumPy's error handling",
    "torch.autograd.set_grad_enabled": "PyTorch's gradient mode",
    "torch.cuda.set_device": "the current CUDA device",
    "torch.set_grad_enabled": "PyTorch's gradient mode",
}

_OF_PROCESS = {
    *("os.chdir", "os.environ.pop", "os.environ.setdefault", "os.environ.update", "os.putenv"),
    *("os.umask", "os.unsetenv", "locale.setlocale", "random.seed", "socket.setdefaulttimeout"),
    *("numpy.random.seed", "torch.cuda.set_device", "torch.manual_seed", "torch.set_num_threads"),
    *("torch.set_default_device", "torch.set_default_dtype", "tensorflow.random.set_seed"),
    *("torch.cuda.manual_seed", "torch.cuda.manual_seed_all", "torch.set_num_interop_threads"),
    *("torch.cuda.set_per_process_memory_fraction", "torch.use_deterministic_algorithms"),
    *("torch.distributed.init_process_group", "multiprocessing.set_start_method"),
    *("transformers.set_seed", "tensorflow.keras.utils.set_random_seed", "dotenv.load_dotenv"),
    *("resource.setrlimit", "sys.setrecursionlimit", "gc.disable", "time.tzset"),
}


def settings_of_process(function: Function, sources: Sources) -> Iterator[tuple[Unsafe, str]]:
    """Yield the statements of a function that set what all of the process share, described."""
    for node in own_nodes(function.node):
        if isinstance(node, ast.Call):
            name = sources.full_name(node.func, function.file)
            if name in _OF_PROCESS:
                yield Unsafe("IG107", node, ""), f"calls `{name}`"
        elif (
            isinstance(node, ast.Subscript)
            and not isinstance(node.ctx, ast.Load)
            and sources.full_name(node.value, function.file) == "os.environ"
        ):
            yield Unsafe("IG107", node, ""), f"changes `{ast.unparse(node)}`"


def connections_of_module(function: Function, sources: Sources) -> Iterator[tuple[Unsafe, str]]:
    """Yield the thread-affine objects of the module that a function uses, described."""
    for made in state_around(function.file, function.cls, sources).made:
        found = _affine(made, None)
        if found is not None and "." not in made.place and _uses(function, made.place):
            yield Unsafe("IG106", made.call, made.place), f"{found[1]} that {function.name} uses"


def loop_uses(function: Function, sources: Sources) -> Iterator[tuple[Unsafe, str]]:
    """Yield the uses of an event loop in a `def` that will run in a thread, with descriptions."""
    state = state_around(function.file, function.cls, sources)
    # In a `try` that catches `RuntimeError` the code is ready for no loop.
    ready = {
        inner
        for node in own_nodes(function.node)
        if isinstance(node, ast.Try)
        and any(h.type is None or "RuntimeError" in ast.unparse(h.type) for h in node.handlers)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in own_nodes(function.node):
        if (
            isinstance(node, ast.Call)
            and node not in ready
            and (used := _loop_use(node, function, sources, state))
        ):
            yield Unsafe("IG103", node, ""), used


def awaitables(function: Function, sources: Sources) -> Iterator[tuple[Unsafe, str]]:
    """Yield the `return`s of awaitables in a `def`, with their names."""
    for node in own_nodes(function.node):
        if not isinstance(node, ast.Return) or not isinstance(node.value, ast.Call):
            continue
        target = callee(node.value, function, sources)
        name = sources.full_name(node.value.func, function.file)
        if target is not None and target.is_async and not target.is_generator:
            yield Unsafe("IG105", node, ""), f"`{target.name}`"
        elif name in _AWAITABLES:
            yield Unsafe("IG105", node, ""), f"`{name}`"


def affine_objects(
    constructor: Function, users: Iterable[Function], sources: Sources
) -> Iterator[tuple[Unsafe, str]]:
    """Yield the thread-affine objects that a constructor makes and `users` use, described."""
    users = list(users)
    for made in state_around(constructor.file, constructor.cls, sources).made:
        found = _affine(made, constructor)
        user = next((each for each in users if _uses(each, made.place)), None)
        if found is not None and user is not None:
            where, what = found
            yield Unsafe("IG106", where, made.place), f"makes {what} that {user.name} uses"
    for node in own_nodes(constructor.node):
        if isinstance(node, ast.Call) and users:
            name = sources.full_name(node.func, constructor.file)
            if name in _THREAD_STATE:
                yield (
                    Unsafe("IG106", node, ""),
                    f"sets {_THREAD_STATE[name]}, which is per thread,",
                )


def _loop_use(node: ast.Call, function: Function, sources: Sources, state: State) -> str:
    name = sources.full_name(node.func, function.file)
    if name.startswith("asyncio.") and name.rpartition(".")[2] in _NEEDS_LOOP:
        return f"`{name}` needs a running event loop"
    if not isinstance(node.func, ast.Attribute):
        return ""
    owner, method = dotted(node.func.value), node.func.attr
    place = owner
    if function.receiver and owner.startswith(f"{function.receiver}."):
        place = f"self.{owner.partition('.')[2]}"
    makers = {made.full_name for made in state.made if made.place == place}
    last = {maker.rpartition(".")[2] for maker in makers if maker.startswith("asyncio.")}
    is_loop = owner.rpartition(".")[2] in _LOOP_NAMES or last & _LOOP_MAKERS
    if method in _LOOP_METHODS and is_loop:
        return f"`{owner}.{method}` is not thread-safe"
    if method in _PRIMITIVE_METHODS and last & _PRIMITIVES:
        return f"`{owner}.{method}` of an asyncio object is not thread-safe"
    return ""


def _affine(made: Made, constructor: Function | None) -> tuple[ast.expr, str] | None:
    """Return the expression that binds an object to the constructor's thread, and a description.

    `None` if the object is not bound to the thread. Without a constructor it is the module's.
    """
    if made.full_name == "threading.local":
        if constructor is None:
            return None
        # It may be made anywhere: an attribute set here exists only in this thread.
        begin = f"{_written(made.place, constructor)}."
        for node in own_nodes(constructor.node):
            is_stored = isinstance(getattr(node, "ctx", None), ast.Store)
            if is_stored and isinstance(node, ast.Attribute) and dotted(node).startswith(begin):
                return node, "an attribute of a threading.local()"
        return None
    # `sqlite3.connect(..., check_same_thread=False)` is for any thread.
    if made.function is not constructor or any(
        each.arg == "check_same_thread" and ast.unparse(each.value) == "False"
        for each in made.call.keywords
    ):
        return None
    named = (what for name, what in _AFFINE.items() if f"{made.full_name}.".startswith(f"{name}."))
    return next(((made.call, what) for what in named), None)


def _uses(function: Function, place: str) -> bool:
    name = _written(place, function)
    return any(
        isinstance(node, ast.Attribute | ast.Name) and dotted(node) == name
        for node in own_nodes(function.node)
    )


def _written(place: str, function: Function) -> str:
    """Return a place as the function spells it: `self` may have another name there."""
    head, dot, rest = place.partition(".")
    return f"{function.receiver if head == 'self' else head}{dot}{rest}"
