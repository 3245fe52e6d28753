"""The generator of random applications.

A program has functions, which are dependencies or endpoints, and each has a place: the module, the
class, or a base of it. The plain rendering writes all of them into the module, without `self`; the
class rendering writes those of a class into its body. Both have the same names, parameters and
effects, so FastAPI's answers to both are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

HEAD = """
import dataclasses, functools
from typing import Annotated, Any, Generic, NamedTuple, TypeVar
from fastapi import (APIRouter, BackgroundTasks, Body, Cookie, Depends, FastAPI, Form, Header,
                     HTTPException, Query, Request, Response, Security, WebSocket)
from fastapi.security import SecurityScopes
from pydantic import BaseModel
LOG = []
T = TypeVar("T")
class Item(BaseModel):
    name: str
    size: int = 1
def note(name, *values):
    LOG.append([name, *values])
    return [name, *values]
def shown(value):
    return value if isinstance(value, (str, int, float, list, dict, type(None))) else "an object"
def logged(func):
    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        return func(*args, **kwargs)
    return wrapper
def measured(func):
    @functools.wraps(func)
    async def wrapper(*args, **kwargs):
        return await func(*args, **kwargs)
    return wrapper
class Retrying:
    def __call__(self, fn, *args, **kwargs):
        return fn(*args, **kwargs)
def retried(func):
    retrying = Retrying()
    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        return retrying(func, *args, **kwargs)
    return wrapper
def guard_all(inner):
    async def layer(scope, receive, send):
        if scope["type"] == "http" and (b"x-out", b"1") in scope["headers"]:
            return await Response("out", 403)(scope, receive, send)
        await inner(scope, receive, send)
    return layer
class Layer:
    def __init__(self, app): self.app = app
    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and (b"x-out", b"1") in scope["headers"]:
            return await Response("out", 403)(scope, receive, send)
        await self.app(scope, receive, send)
class Paging:
    def __init__(self, limit: int = 3, x_token: Annotated[str, Header()] = ""):
        if x_token == "bad": raise HTTPException(401)
        self.limit = limit
@dataclasses.dataclass(frozen=True)
class Need:
    area: str
    role: str = dataclasses.field(default="guest", compare=False)
    def __call__(self, role: str = "guest"):
        note("Need", self.area, self.role)
        if role != self.role: raise HTTPException(403)
        return self.role
@dataclasses.dataclass(frozen=True)
class Const:
    value: Any
    def __call__(self): return self.value
class CanRead(NamedTuple):
    area: str
    def __call__(self): return "may read"
class CanWrite(NamedTuple):
    area: str
    async def __call__(self, key: str = ""):
        if key != "k": raise HTTPException(403)
        return "may write"
class Strict:
    def __init__(self, role): self.role = role
    def __eq__(self, other): return isinstance(other, Strict) and other.role == self.role
    def __hash__(self): return hash(self.role)
    def __call__(self, x_token: Annotated[str, Header()] = ""):
        note("Strict", self.role)
        if not x_token: raise HTTPException(401)
        return self.role
def base_value(n: int = 1, m: int = 2): return n * 10 + m
strict = Strict("a")
part = functools.partial(base_value, m=5)
app = FastAPI()
"""

OBJECTS = (
    'Need("shop")',
    'Need("shop", "admin")',
    "Const(1)",
    "Const(True)",
    'CanRead("shop")',
    'CanWrite("shop")',
    "strict",
    'Strict("b")',
    "part",
    "functools.partial(base_value, n=4)",
    "Paging",
    "lambda q=5: int(q) + 1",
    "lambda: None",
)
PLACES = ("module", "class", "class", "class", "base")
WRAPPERS = {"def": ("logged", "retried"), "async def": ("logged", "measured", "retried")}
INSTANCE = ("self", "self", "self", "self", "this", "me")
FORMS = ("def", "async def", "def yield", "async yield")


@dataclass
class Function:
    """A function of the program.

    `bare` is how it is written in a class without `self`, `above` a decorator above its route. With
    `is_redefined`, the class redefines the method of its base.
    """

    name: str
    place: str
    form: str
    parameters: list[str]
    is_guard: bool
    bare: str = ""
    wrapper: str = ""
    route: str = ""
    above: str = ""
    is_redefined: bool = False
    is_websocket: bool = False

    @property
    def is_method(self) -> bool:
        return self.place != "module" and not self.bare


@dataclass
class Program:
    """A random application; `text` renders it, `asks` are its requests."""

    seed: int
    is_future: bool = False
    functions: list[Function] = field(default_factory=list)
    aliases: list[tuple[str, str, str]] = field(default_factory=list)
    router_lines: list[str] = field(default_factory=list)
    end_lines: list[str] = field(default_factory=list)
    app_guard: str = ""
    paths: list[tuple[str, str, bool]] = field(default_factory=list)
    overrides: list[tuple[str, str]] = field(default_factory=list)
    overrides_at: str = ""
    is_generic: bool = False
    is_slotted: bool = False
    instance: str = "self"
    has_other: bool = False

    def text(self, *, plain: bool) -> str:
        lines = ["from __future__ import annotations"] if self.is_future else []
        lines += [HEAD]
        for place in ("module", "base", "class"):
            body = list(self._body(place, plain=plain))
            if place == "module":
                # After the dependencies, before the endpoints.
                at = next(
                    (n for n, each in enumerate(body) if "@app" in each or "@router" in each), 99
                )
                body[at:at] = self._made(self.router_lines, "module", plain=plain)
            if place == "module" or plain:
                lines += body
                continue
            if place == "class" and self.has_other:
                lines += ["class Other:", '    @app.get("/other")', "    async def f0(self): ..."]
                lines += ["import ingress as serve", "serve.ingress(app)(Other)"]
            bases = ("Generic[T]" if self.is_generic else "") if place == "base" else self._base()
            is_slotted = self.is_slotted and place == "class"
            lines += ["@dataclasses.dataclass(slots=True, eq=False)"] if is_slotted else []
            lines.append(f"class {'Base' if place == 'base' else 'Api'}({bases}):")
            lines.append("    secret = 'SECRET-OF-THE-CLASS'")
            me = self.instance
            if not is_slotted:
                lines.append(f"    def __init__({me}): {me}.own = 'SECRET-OF-THE-INSTANCE'")
            else:
                lines.append("    own: str = 'SECRET-OF-THE-INSTANCE'")
            lines += ["    " + each for line in body for each in line.split("\n")]
        lines += self._made(self.end_lines, "end", plain=plain)
        # Routes of Starlette's, which no dependency of the app guards.
        lines += ["import json", "async def read_log(request):"]
        lines += ["    seen = json.dumps(LOG, default=shown); LOG.clear(); return Response(seen)"]
        lines += ["async def set_overrides(request):"]
        lines += ["    app.dependency_overrides.clear()"]
        lines += ["    if request.path_params['on'] == '1':"]
        lines += ["        pass", *("        " + each for each in self._overridden(plain=plain))]
        lines += ["    return Response()", "app.add_route('/--log', read_log)"]
        lines += ["app.add_route('/--overrides/{on}', set_overrides)"]
        if self.overrides_at == "before":
            lines += self._overridden(plain=plain)
        return "\n".join(lines) + "\n"

    def _base(self) -> str:
        return "Base[int]" if self.is_generic else "Base"

    def _overridden(self, *, plain: bool) -> list[str]:
        return [
            f"app.dependency_overrides[{self._name(key, 'end', plain)}] = "
            f"{self._name(value, 'end', plain)}"
            for key, value in self.overrides
        ]

    def _body(self, place: str, *, plain: bool) -> Iterator[str]:
        for name, where, text in self.aliases:
            if where == place and not name.startswith("Late"):
                yield f"{name} = {self._fill(text, place, plain)}"
        for each in self.functions:
            if each.place == place:
                yield self._function(each, place, plain=plain)
                for name, where, text in self.aliases:
                    if where == place and name == f"Late{each.name}":
                        yield f"{name} = {self._fill(text, place, plain)}"
            elif place == "class" and each.is_redefined and not plain:
                yield self._function(replace(each, place="class", route=""), place, plain=False)

    def _function(self, func: Function, place: str, *, plain: bool) -> str:
        first = [self.instance] if func.is_method and not plain else []
        is_base = func.is_redefined and place == "base" and not plain
        said = f"{'base ' if is_base else ''}{func.name}"
        given = [self._fill(each, place, plain) for each in func.parameters]
        # A parameter without a default cannot come after one with a default, nor can it be first.
        given.sort(key=lambda text: " = " in text)
        head = "async def" if func.form.startswith("async") else "def"
        lines = [f"@{func.above}"] if func.above and not plain else []
        lines += [self._fill(func.route, place, plain)] if func.route else []
        if func.above == "classmethod" and not plain:
            first = ["cls"]
        elif func.above == "staticmethod":
            first = []
        if func.bare == "static" and not plain:
            lines.append("@staticmethod")
        if func.wrapper:
            lines.append(f"@{func.wrapper}")
        lines.append(f"{head} {func.name}({', '.join(first + given)}):")
        names = [text.partition(":")[0].partition(" =")[0] for text in given]
        sent = [each for each in names if each not in _OBJECTS]
        values = ", ".join(f"shown({each})" for each in sent)
        if func.is_guard:
            lines.append("    if x_token != 'good': raise HTTPException(401, 'no token')")
        if "response" in names:
            lines.append(f"    response.headers['x-{func.name}'] = 'set'")
        if "tasks" in names:
            lines.append(f"    tasks.add_task(note, 'task of {func.name}')")
        if func.is_websocket:
            lines.append("    await socket.accept()")
            lines.append(f"    await socket.send_json(note('{said}', {values}))")
            lines.append("    await socket.close()")
        elif func.form.endswith("yield") and not func.name.startswith("e"):
            lines.append(f"    try: yield note('{said}', {values})")
            lines.append(f"    finally: note('end of {func.name}')")
        elif func.form.endswith("yield"):
            lines.append(f"    yield note('{said}', {values})")
            lines.append("    yield 2")
        else:
            lines.append(f"    return note('{said}', {values})")
        return "\n".join(lines)

    def _made(self, lines: list[str], place: str, *, plain: bool) -> list[str]:
        return [self._fill(each, place, plain) for each in lines]

    def _fill(self, text: str, place: str, plain: bool) -> str:
        """Return a text with the names of functions, `<f1>`, as they are known in a place."""
        while "<" in text and ">" in text.partition("<")[2]:
            before, _, rest = text.partition("<")
            name, _, after = rest.partition(">")
            text = before + self._name(name, place, plain) + after
        return text

    def _name(self, name: str, place: str, plain: bool) -> str:
        func = next((each for each in self.functions if each.name == name), None)
        where = func.place if func is not None else ""
        where = where or next((at for alias, at, _ in self.aliases if alias == name), "module")
        if plain or where in ("module", place):
            return name
        return f"{'Base' if where == 'base' else 'Api'}.{name}"


_OBJECTS = ("request", "response", "tasks", "scopes", "socket")


def program(seed: int) -> Program:
    """Return the program of a seed."""
    return _Maker(Random(seed), Program(seed)).make()


class _Maker:
    def __init__(self, random: Random, made: Program) -> None:
        self.random = random
        self.made = made
        self.count = 0

    def make(self) -> Program:
        made, random = self.made, self.random
        made.is_future = random.random() < 0.35
        made.is_generic = random.random() < 0.15
        made.has_other = random.random() < 0.1
        made.is_slotted = random.random() < 0.1
        made.instance = "self" if made.is_slotted else random.choice(INSTANCE)
        places = sorted(
            (random.choice(PLACES) for _ in range(random.randint(2, 6))),
            key=("module", "base", "class").index,
        )
        for index, place in enumerate(places):
            self._dependency(f"f{index}", place)
            if random.random() < 0.3:
                self._alias(place)
        self._routers()
        for index in range(random.randint(1, 4)):
            self._endpoint(f"e{index}", random.choice(("class", "class", "base", "module")))
        self._ends()
        return made

    def _known(self, place: str) -> list[Function]:
        order = ("module", "base", "class", "end").index(place)
        return [
            each for each in self.made.functions
            if not each.route and ("module", "base", "class").index(each.place) <= order
        ]  # fmt: skip

    def _call(self, place: str) -> str:
        known = self._known(place)
        if known and self.random.random() < 0.75:
            return f"<{self.random.choice(known).name}>"
        return self.random.choice(OBJECTS)

    def _depends(self, place: str, *, is_own: bool = False) -> str:
        """Return a `Depends`; with `is_own`, of no object that is equal to another one.

        `typing` makes one `Annotated` of two that are equal, whichever was evaluated first.
        """
        random, call = self.random, self._call(place)
        if is_own and call in OBJECTS[:6]:
            self.count += 1
            call = f'{call.partition("(")[0]}("{self.made.seed}-{self.count}")'
        options = ", use_cache=False" if random.random() < 0.15 else ""
        if random.random() < 0.2:
            return f"Security({call}, scopes=['{random.choice('ab')}']{options})"
        if random.random() < 0.1:
            options += f", scope='{random.choice(('function', 'request'))}'"
        return f"Depends({call}{options})"

    def _parameter(self, name: str, place: str, *, optional: bool) -> str:
        random = self.random
        quote = '"""' if not self.made.is_future and random.random() < 0.12 else ""
        kind = random.randrange(12)
        default = " = 'd'" if optional else ""
        annotated = random.choice((
            "Annotated[str, Query()]", "Annotated[str, Header()]", "Annotated[str, Cookie()]",
        ))  # fmt: skip
        aliases = [
            each for each, where, _ in self.made.aliases
            if where in ("module", place) and not each.startswith("Late")
        ]  # fmt: skip
        if kind < 3:
            return f"{name} = {self._depends(place)}"
        if kind < 6:
            text = f"Annotated[Any, {self._depends(place, is_own=True)}]"
            if random.random() < 0.25:
                text = f"Annotated[{text}, {self._depends(place, is_own=True)}]"
            return f"{name}: {quote}{text}{quote}"
        if kind == 6 and aliases:
            return f"{name}: {quote}<{random.choice(aliases)}>{quote}"
        if kind == 7:
            return f"{name}: int = {random.randint(0, 9)}"
        if kind == 8:
            return f"{name}: {quote}Annotated[str, Query()]{quote}"
        return f"{name}: {quote}{annotated}{quote}{default or ' = ' + repr('d')}"

    def _special(self, *, is_endpoint: bool) -> list[str]:
        chosen = []
        for text, share in (
            ("request: Request", 0.15), ("response: Response", 0.15),
            ("tasks: BackgroundTasks", 0.12), ("scopes: SecurityScopes", 0.1),
        ):  # fmt: skip
            if self.random.random() < share and not (is_endpoint and text.startswith("scopes")):
                chosen.append(text)
        return chosen

    def _dependency(self, name: str, place: str) -> None:
        random = self.random
        is_guard = random.random() < 0.4
        given = [
            self._parameter(f"{name}_{index}", place, optional=True)
            for index in range(random.randint(0, 2))
        ]
        if is_guard:
            given.append("x_token: Annotated[str, Header()] = ''")
        form = random.choice(FORMS)
        func = Function(name, place, form, given + self._special(is_endpoint=False), is_guard)
        if place != "module" and random.random() < 0.2:
            func.bare = random.choice(("without self", "static"))
        elif form == "def" and not given and random.random() < 0.4:
            func.parameters, func.wrapper = [], "functools.lru_cache"
        elif random.random() < 0.2 and not form.endswith("yield"):
            func.wrapper = random.choice(WRAPPERS[form])
        elif place == "base" and random.random() < 0.3:
            func.is_redefined = True
        if (place == "module" or self.made.instance != "self") and random.random() < 0.1:
            func.parameters.append("self: str = 'x'")
        self.made.functions.append(func)

    def _alias(self, place: str) -> None:
        last = self.made.functions[-1]
        text = f"Annotated[Any, Depends(<{last.name}>)]"
        if self.random.random() < 0.3:
            text = f"Annotated[{text}, {self._depends(place, is_own=True)}]"
        self.made.aliases.append((f"Late{last.name}", last.place, text))

    def _routers(self) -> None:
        random = self.random
        self.routers = ["app"]
        if random.random() < 0.15:
            line = f"app.router.dependencies.append({self._depends('module')})"
            self.made.router_lines.append(line)
        if random.random() < 0.5:
            guard = ""
            if random.random() < 0.5:
                guard = f", dependencies=[{self._depends('module')}]"
            self.made.router_lines.append(f'router = APIRouter(prefix="/r"{guard})')
            self.routers.append("router")

    def _endpoint(self, name: str, place: str) -> None:
        random = self.random
        router = random.choice(self.routers)
        is_websocket = random.random() < 0.12
        given = [
            self._parameter(f"{name}_{index}", place, optional=True)
            for index in range(random.randint(0, 3))
        ]
        late = [each for each, where, _ in self.made.aliases if where == place]
        if late and random.random() < 0.5:
            given.append(f"{name}_late: <{random.choice(late)}>")
        path = f"/{name}"
        if random.random() < 0.3:
            path += "/{key}"
            given.append("key: int")
        method = random.choice(("get", "get", "post"))
        if method == "post" and not is_websocket:
            given.append("item: Item")
        given += [each for each in self._special(is_endpoint=True) if not is_websocket]
        form = "async def" if is_websocket else random.choice((*FORMS[:2], *FORMS[:2], *FORMS))
        guards = []
        if random.random() < 0.35:
            guards = [self._depends(place) for _ in range(random.randint(1, 2))]
        options = f", dependencies=[{', '.join(guards)}]" if guards else ""
        verb = "websocket" if is_websocket else method
        if is_websocket:
            given.append("socket: WebSocket")
        func = Function(name, place, form, given, is_guard=False, is_websocket=is_websocket)
        func.route = f'@{router}.{verb}("{path}"{options})'
        if place != "module" and random.random() < 0.1:
            func.bare = "static"
        elif place != "module" and random.random() < 0.08 and method == "get":
            func.above = random.choice(("staticmethod", "classmethod"))
        elif random.random() < 0.15 and not form.endswith("yield") and not is_websocket:
            func.wrapper = random.choice(WRAPPERS[form])
        elif place == "base" and random.random() < 0.2:
            func.is_redefined = True
        self.made.functions.append(func)
        prefix = "/r" if router == "router" else ""
        self.made.paths.append((verb, prefix + path.replace("{key}", "7"), bool(guards)))

    def _ends(self) -> None:
        random, made = self.random, self.made
        if "router" in self.routers:
            guard = f", dependencies=[{self._depends('end')}]" if random.random() < 0.4 else ""
            made.end_lines.append(f"app.include_router(router{guard})")
        if random.random() < 0.2:
            # A route of the module that uses a method of the class.
            made.end_lines += [
                f'@app.get("/late", dependencies=[{self._depends("end")}])',
                f"async def late(value=Depends({self._call('end')})): return shown(value)",
            ]
            made.paths.append(("get", "/late", True))
        if random.random() < 0.2:
            layer = random.choice(("guard_all", "Layer"))
            made.end_lines += [
                "for route in app.routes:",
                f"    if hasattr(route, 'dependant'): route.app = {layer}(route.app)",
            ]
        known = self._known("end")
        if known and random.random() < 0.5:
            made.overrides_at = random.choice(
                ("before", "while serving", "while serving", "by one")
            )
            keys = random.sample(known, k=min(len(known), random.randint(1, 2)))
            for index, key in enumerate(keys):
                name = f"o{index}"
                place = random.choice(("module", "class"))
                form = random.choice(FORMS)
                given = ["q: int = 4"] if random.random() < 0.5 else []
                if random.random() < 0.2:
                    given.append("scopes: SecurityScopes")
                made.functions.append(Function(name, place, form, given, is_guard=False))
                made.overrides.append((key.name, name))
            if random.random() < 0.3:
                made.overrides[0] = ("strict", made.overrides[0][1])
            if made.overrides_at == "by one":
                self._overriding(made.overrides[0])
        elif random.random() < 0.3:
            made.overrides_at = "before"
            made.overrides.append(("print", "base_value"))

    def _overriding(self, override: tuple[str, str]) -> None:
        """Have a dependency of a route set the override that a later dependency of it has."""
        key, value = (f"<{name}>" for name in override)
        self.made.end_lines += [
            "async def setting():",
            f"    app.dependency_overrides[{key}] = {value}",
            '@app.get("/set")',
            f"async def set_(a=Depends({key}), b=Depends(setting),",
            f"               c=Depends({key}, use_cache=False)): return shown(c)",
        ]
        self.made.paths.insert(0, ("get", "/set", False))
