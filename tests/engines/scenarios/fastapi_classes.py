"""FastAPI apps, routers and other ASGI apps, served by classes."""

from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import (
    APIRouter,
    Body,
    Depends,
    FastAPI,
    Header,
    HTTPException,
    Request,
    Response,
    WebSocket,
)
from fastapi.responses import PlainTextResponse, StreamingResponse
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tests.engines.api import serve
from tests.engines.client import Client, answer, outcome, refused
from tests.engines.probe import here, note, notes, wait_for_notes
from tests.engines.suite import Deviation, scenario


class Item(BaseModel):
    name: str
    price: float = 1.0


class Secret(Item):
    secret: str = "hidden"


class TeaError(Exception):
    """An error that the app has a handler for."""


app = FastAPI(title="Shop")


@app.exception_handler(TeaError)
async def tea(request: Request, error: TeaError) -> Response:
    return PlainTextResponse("short and stout", 418)


@app.middleware("http")
async def marked(request: Request, call_next: Any) -> Any:
    response = await call_next(request)
    response.headers["x-middleware"] = "seen"
    return response


def plain_dependency() -> str:
    return here()


async def coroutine_dependency() -> str:
    return here()


def yielding_dependency() -> Any:
    note("dependency", f"open {here()}")
    yield "yielded"
    note("dependency", "closed")


@app.get("/free")
def free() -> str:
    return "no class"


@serve.ingress(app)
class Shop:
    def __init__(self, name: str = "shop") -> None:
        self.name = name

    @app.get("/items/{number}")
    async def item(
        self, number: int, q: str = "none", x_mine: Annotated[str | None, Header()] = None
    ) -> dict[str, Any]:
        return {"shop": self.name, "number": number, "q": q, "header": x_mine}

    @app.post("/items", status_code=201)
    async def add(self, item: Item, tag: Annotated[str, Body()] = "t") -> Any:
        return {"item": item, "tag": tag}

    @app.get("/secret", response_model=Item)
    async def secret(self) -> Any:
        return Secret(name="x")

    @app.get("/place/def")
    def place_of_def(self) -> list[str]:
        return [here(), self.name]

    @app.get("/place/async")
    async def place_of_coroutine(this) -> list[str]:
        return [here(), this.name]

    @app.get("/place/dependencies")
    async def places(
        self, plain: str = Depends(plain_dependency), coroutine: str = Depends(coroutine_dependency)
    ) -> list[str]:
        return [plain, coroutine]

    @app.get("/yields")
    async def yields(self, value: str = Depends(yielding_dependency)) -> str:
        return value

    @app.get("/teapot")
    async def teapot(self) -> None:
        raise TeaError

    @app.get("/forbidden")
    def forbidden(self) -> None:
        raise HTTPException(403, {"why": "no"}, {"x-why": "no"})

    @app.get("/broken")
    async def broken(self) -> None:
        raise ValueError("secret")

    @app.get("/same")
    async def same(self) -> str:
        return "first"

    @app.get("/other")  # type: ignore[no-redef]
    async def same(self) -> str:  # noqa: F811
        return "second"

    @app.get("/stream")
    async def stream(self) -> StreamingResponse:
        return StreamingResponse((f"{here()}{n}," for n in range(2)), media_type="text/plain")

    @app.get("/background")
    async def background(self) -> Response:
        return PlainTextResponse("sent", background=BackgroundTask(note, "background", "ran"))

    @app.get("/url")
    async def url(self, request: Request) -> list[str]:
        return [request.url_for("url").path, request.url.path, request.scope["root_path"]]

    def helper(self, value: int) -> list[Any]:
        return [self.name, value]

    @app.websocket("/echo")
    async def echo(self, websocket: WebSocket) -> None:
        await websocket.accept()
        async for message in websocket.iter_text():
            if message == "close":
                await websocket.close(4001)
                return
            if message == "fail":
                raise ValueError("in the socket")
            if message == "return":
                return
            await websocket.send_text(f"{self.name} {message}")

    @app.websocket("/refused")
    async def refused(self, websocket: WebSocket) -> None:
        await websocket.close(1008)


def shop() -> Any:
    return serve.deployment(Shop).bind("corner")


CBV = "FastAPI classes"


@scenario(CBV, shop)
def path_query_and_header_reach_a_method(it: Client) -> Any:
    return [it.get("/items/3?q=x", **{"x-mine": "m"}).json(), it.get("/items/4").json()]


@scenario(CBV, shop)
def a_body_is_validated_and_a_status_kept(it: Client) -> Any:
    good = it.request("POST", "/items", json={"item": {"name": "n"}, "tag": "u"})
    bad = it.request("POST", "/items", json={"item": {"price": "?"}})
    return [answer(good), bad.status_code, [each["loc"] for each in bad.json()["detail"]]]


@scenario(CBV, shop)
def a_parameter_of_the_wrong_type_is_a_422(it: Client) -> Any:
    return answer(it.get("/items/none"))


@scenario(CBV, shop)
def a_response_model_leaves_out_what_it_does_not_have(it: Client) -> Any:
    return answer(it.get("/secret"))


@scenario(CBV, shop)
def the_first_parameter_may_have_any_name(it: Client) -> Any:
    return it.get("/place/async").json()


@scenario(CBV, shop)
def two_methods_of_one_name_are_two_routes(it: Client) -> Any:
    return [it.get("/same").json(), it.get("/other").json()]


@scenario(CBV, shop)
def a_function_beside_the_class_is_served_too(it: Client) -> Any:
    return answer(it.get("/free"))


@scenario("Where FastAPI endpoints run", shop)
def an_endpoint_runs_as_in_fastapi_at_both_values_of_the_flag(it: Client) -> Any:
    return [it.get("/place/def").json(), it.get("/place/async").json()]


@scenario("Where FastAPI endpoints run", shop)
def dependencies_run_as_in_fastapi(it: Client) -> Any:
    return it.get("/place/dependencies").json()


@scenario("Where FastAPI endpoints run", shop)
def a_yield_dependency_is_closed_after_the_response(it: Client) -> Any:
    return [it.get("/yields").json(), wait_for_notes("dependency", 2)]


@scenario(CBV, shop)
def a_method_is_called_by_handle_as_it_is(it: Client) -> Any:
    return [it.call("helper", 2), it.call("place_of_coroutine")]


@scenario(CBV, shop, Deviation("the error says which methods there are"))
def an_ingress_class_itself_cannot_be_called_by_handle(it: Client) -> Any:
    return outcome(lambda: it.handle.remote().result())


@scenario(CBV, shop)
def exception_handlers_and_middleware_of_the_app_run(it: Client) -> Any:
    response = it.get("/teapot")
    return [answer(response), response.headers.get("x-middleware")]


@scenario(CBV, shop)
def an_http_exception_of_an_endpoint_has_its_status_and_headers(it: Client) -> Any:
    response = it.get("/forbidden")
    return [answer(response), response.headers.get("x-why")]


@scenario(CBV, shop)
def an_exception_of_an_endpoint_is_a_500(it: Client) -> Any:
    return answer(it.get("/broken"))


@scenario(CBV, shop)
def no_route_and_no_method_are_fastapis(it: Client) -> Any:
    return [answer(it.get("/absent")), answer(it.request("DELETE", "/items/1"))]


@scenario(CBV, shop)
def a_streaming_response_of_an_endpoint_arrives_whole(it: Client) -> Any:
    return answer(it.get("/stream"))


@scenario(CBV, shop)
def a_background_task_runs_after_the_response(it: Client) -> Any:
    return [it.get("/background").text, wait_for_notes("background")]


@scenario("Prefixes", shop)
def urls_are_made_with_the_prefix(it: Client) -> Any:
    return it.get("/url").json()


@scenario("Prefixes", shop)
def docs_and_schema_are_under_the_prefix(it: Client) -> Any:
    schema = it.get("/openapi.json").json()
    docs = it.get("/docs")
    return [schema["servers"], docs.status_code, f"{it.prefix}/openapi.json" in docs.text]


@scenario(CBV, shop)
def the_schema_has_no_self(it: Client) -> Any:
    schema = it.get("/openapi.json").json()
    parameters = schema["paths"]["/items/{number}"]["get"]["parameters"]
    return [sorted(each["name"] for each in parameters), sorted(schema["paths"])]


@scenario("WebSockets", shop)
def a_websocket_reaches_a_method_with_its_instance(it: Client) -> Any:
    with connected(it, "/echo") as socket:
        socket.send("hello")
        return socket.recv()


@scenario("WebSockets", shop)
def a_close_code_of_the_handler_arrives(it: Client) -> Any:
    return closed_after(it, "close")


@scenario(
    "WebSockets",
    shop,
    Deviation(
        "the client can tell it from a network failure", row="WebSocket whose handler raised"
    ),
)
def a_websocket_whose_handler_raised_is_closed_with_a_code(it: Client) -> Any:
    return closed_after(it, "fail")


@scenario(
    "WebSockets",
    shop,
    Deviation("it ended well", row="WebSocket whose handler returned without closing"),
)
def a_websocket_whose_handler_returned_is_closed(it: Client) -> Any:
    return closed_after(it, "return")


@scenario("WebSockets", shop)
def a_websocket_that_is_not_accepted_is_a_403(it: Client) -> Any:
    from websockets.exceptions import InvalidStatus

    try:
        connected(it, "/refused")
    except InvalidStatus as error:
        return error.response.status_code


def connected(it: Client, path: str) -> Any:
    from websockets.sync.client import connect

    url = it.base_url.replace("http://", "ws://")
    return connect(f"{url}{it.prefix}{path}", open_timeout=20, close_timeout=5, proxy=None)


def closed_after(it: Client, message: str) -> Any:
    from websockets.exceptions import ConnectionClosed

    with connected(it, "/echo") as socket:
        socket.send(message)
        try:
            socket.recv()
        except ConnectionClosed as error:
            return error.rcvd.code if error.rcvd else None


# Inheritance


base_app = FastAPI()


class Base:
    kind = "base"

    @base_app.get("/inherited")
    async def inherited(self) -> str:
        return self.kind


@serve.ingress(base_app)
class Derived(Base):
    kind = "derived"

    @base_app.get("/own")
    async def own(self) -> str:
        return self.kind


def derived() -> Any:
    return serve.deployment(Derived).bind()


@scenario(CBV, derived)
def an_inherited_endpoint_gets_the_subclass(it: Client) -> Any:
    return [it.get("/inherited").json(), it.get("/own").json()]


# Routers


routed_app = FastAPI()
router = APIRouter(prefix="/r", tags=["router"])
guarded_router = APIRouter()


def guard(authorization: Annotated[str | None, Header()] = None) -> None:
    if authorization is None:
        raise HTTPException(401, "no token")


own_guard_router = APIRouter(dependencies=[Depends(guard)])


class Routed:
    @router.get("/method")
    async def method(self) -> str:
        return type(self).__name__

    @guarded_router.get("/guarded")
    async def guarded(self) -> str:
        return "secret"

    @own_guard_router.get("/own-guard")
    async def own_guard(self) -> str:
        return "secret"


@guarded_router.get("/guarded-function")
async def guarded_function() -> str:
    return "secret"


routed_app.include_router(router, prefix="/v1")
routed_app.include_router(guarded_router, dependencies=[Depends(guard)], tags=["guarded"])
routed_app.include_router(own_guard_router)
Routed = serve.ingress(routed_app)(Routed)  # type: ignore[misc]


def routed() -> Any:
    return serve.deployment(Routed).bind()


ROUTERS = "Routers in a FastAPI class"
GUARD_KEPT = Deviation(
    "an auth guard must not be bypassed", row="include-level `dependencies=` in an ingress app"
)


@scenario(ROUTERS, routed)
def prefixes_of_a_router_and_of_its_include_add_up(it: Client) -> Any:
    return answer(it.get("/v1/r/method"))


@scenario(ROUTERS, routed, GUARD_KEPT)
def a_dependency_of_an_include_guards_a_method(it: Client) -> Any:
    return [it.get("/guarded").status_code, it.get("/guarded", authorization="x").status_code]


@scenario(ROUTERS, routed)
def a_dependency_of_an_include_guards_a_function(it: Client) -> Any:
    return it.get("/guarded-function").status_code


@scenario(ROUTERS, routed)
def a_dependency_of_a_router_guards_its_methods(it: Client) -> Any:
    return [it.get("/own-guard").status_code, it.get("/own-guard", authorization="x").status_code]


@scenario(ROUTERS, routed, GUARD_KEPT)
def tags_of_an_include_are_in_the_schema(it: Client) -> Any:
    paths = it.get("/openapi.json").json()["paths"]
    return [paths["/v1/r/method"]["get"].get("tags"), paths["/guarded"]["get"].get("tags")]


def included_twice() -> Any:
    twice, both = APIRouter(), FastAPI()

    class Twice:
        @twice.get("/method")
        async def method(self) -> str:
            return "there"

    both.include_router(twice, prefix="/a")
    both.include_router(twice, prefix="/b")
    return serve.deployment(serve.ingress(both)(Twice)).bind()


@scenario(ROUTERS, None, Deviation("works", row="a router included twice"))
def a_router_may_be_included_twice(it: Client) -> Any:
    def deploy() -> Any:
        prefix = f"/twice{it.suffix}"
        it.deploy(included_twice(), "twice", route_prefix=prefix)
        return [it.http.get(f"{prefix}/{each}/method").status_code for each in "ab"]

    return outcome(deploy)


def declared_order() -> Any:
    ordered = FastAPI()

    class Ordered:
        @ordered.get("/items/special")
        async def special(self) -> str:
            return "method"

    @ordered.get("/items/{name}")
    async def any_item(name: str) -> str:
        return "function"

    return serve.deployment(serve.ingress(ordered)(Ordered)).bind()


@scenario(
    "FastAPI classes",
    declared_order,
    Deviation("the order in which they are written", row="declared route order"),
)
def the_first_route_that_matches_answers(it: Client) -> Any:
    return it.get("/items/special").json()


def added_later() -> Any:
    grows = FastAPI()

    class Grows:
        @grows.get("/early")
        async def early(self) -> str:
            return "early"

    made = serve.deployment(serve.ingress(grows)(Grows))

    @grows.get("/late")
    async def late() -> str:
        return "late"

    return made.bind()


@scenario(
    "Apps that several classes share",
    added_later,
    Deviation(
        "routes are bound when the application is built", row="routes added after decoration"
    ),
)
def a_route_added_after_the_decorator_is_served(it: Client) -> Any:
    return [it.get("/early").status_code, it.get("/late").status_code]


shared = FastAPI()


@shared.get("/free")
async def shared_free() -> str:
    return "free"


@serve.ingress(shared)
class FirstOfTwo:
    @shared.get("/first")
    async def first(self) -> str:
        return type(self).__name__


@serve.ingress(shared)
class SecondOfTwo:
    @shared.get("/second")
    async def second(self) -> str:
        return type(self).__name__


def first_of_two() -> Any:
    return serve.deployment(FirstOfTwo).bind()


def second_of_two() -> Any:
    return serve.deployment(SecondOfTwo).bind()


@scenario("Apps that several classes share", first_of_two)
def the_first_of_two_classes_on_an_app_has_its_own_methods(it: Client) -> Any:
    return [it.get(path).status_code for path in ("/free", "/first", "/second")]


@scenario("Apps that several classes share", second_of_two)
def the_second_of_two_classes_on_an_app_has_its_own_methods(it: Client) -> Any:
    return [it.get(path).status_code for path in ("/free", "/first", "/second")]


# Other ASGI apps


def built() -> FastAPI:
    made = FastAPI()

    @made.get("/")
    def root() -> str:
        return "built"

    return made


@serve.ingress(built)
class Built:
    pass


def builder() -> Any:
    return serve.deployment(Built).bind()


@scenario("Apps made in the replica", builder)
def a_function_that_makes_the_app_is_called_in_the_replica(it: Client) -> Any:
    return answer(it.get("/"))


def late_bound() -> Any:
    @serve.ingress()
    class LateBound:
        def __init__(self, word: str) -> None:
            self.word = word

        async def __serve_build_asgi_app__(self) -> Any:
            made = FastAPI()
            word = self.word

            @made.get("/")
            async def root() -> str:
                return word

            return made

    return serve.deployment(LateBound).bind("late")


@scenario("Apps made in the replica", late_bound)
def a_class_may_make_its_app_after_its_constructor(it: Client) -> Any:
    return answer(it.get("/"))


async def homepage(request: Request) -> Response:
    return PlainTextResponse("starlette")


starlette_app = Starlette(routes=[Route("/", homepage)])


@serve.ingress(starlette_app)
class OnStarlette:
    pass


def starlette() -> Any:
    return serve.deployment(OnStarlette).bind()


@scenario("Other ASGI apps", starlette)
def a_starlette_app_is_served(it: Client) -> Any:
    return answer(it.get("/"))


def raw_asgi() -> Any:
    async def asgi(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("raw")(scope, receive, send)

    made = serve.deployment(max_constructor_retry_count=1)
    return made(serve.ingress(asgi)(type("Raw", (), {}))).bind()


@scenario(
    "Other ASGI apps",
    None,
    Deviation("recognised as an app", row="`async def asgi(scope, receive, send)`"),
)
def a_raw_asgi_function_is_an_app(it: Client) -> Any:
    return served_at(it, raw_asgi, "raw")


class NoLifespan:
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        await PlainTextResponse("no lifespan")(scope, receive, send)


def no_lifespan() -> Any:
    made = serve.deployment(max_constructor_retry_count=1)
    return made(serve.ingress(NoLifespan())(type("Without", (), {}))).bind()


@scenario("Other ASGI apps", None, Deviation("served without", row="apps without lifespan support"))
def an_app_that_knows_no_lifespan_is_served(it: Client) -> Any:
    return served_at(it, no_lifespan, "without")


def alone() -> Any:
    on_its_own = APIRouter()

    class Alone:
        @on_its_own.get("/")
        async def root(self) -> str:
            return "alone"

    return serve.deployment(serve.ingress(on_its_own)(Alone)).bind()


@scenario(CBV, None, Deviation("wrapped in a FastAPI app", row="an `APIRouter` alone"))
def a_router_alone_is_an_app(it: Client) -> Any:
    return served_at(it, alone, "alone")


def served_at(it: Client, factory: Any, name: str) -> Any:
    prefix = f"/{name}{it.suffix}"
    try:
        it.deploy(factory(), name, route_prefix=prefix)
    except Exception as error:
        return f"does not start: {type(error).__name__}"
    response = it.http.get(f"{prefix}/")
    return [response.status_code, response.text]


def depends_on_method() -> Any:
    needy = FastAPI()

    class Needy:
        async def user(self, name: str = "anonymous") -> str:
            return f"{type(self).__name__} {name}"

        @needy.get("/")
        async def root(self, user: str = Depends(user)) -> str:
            return user

    return serve.deployment(serve.ingress(needy)(Needy)).bind()


@scenario(CBV, depends_on_method, Deviation("works", row="`Depends(method_of_the_class)`"))
def a_method_may_be_a_dependency(it: Client) -> Any:
    return [it.get("/").status_code, it.get("/?name=Ada").text]


# Lifespan


@asynccontextmanager
async def lived(app: FastAPI) -> Any:
    note("lifespan", "startup")
    app.state.of_app = "app state"
    yield {"of_lifespan": "lifespan state"}
    note("lifespan", "shutdown")


living = FastAPI(lifespan=lived)


@serve.ingress(living)
class Living:
    def __init__(self) -> None:
        note("lifespan", "constructor")

    def reconfigure(self, config: Any) -> None:
        note("lifespan", f"reconfigure {config}")

    def check_health(self) -> None:
        if "healthy" not in notes("lifespan"):
            note("lifespan", "healthy")

    def __del__(self) -> None:
        note("lifespan", "deleted")

    @living.get("/state")
    async def state(self, request: Request) -> list[Any]:
        of_lifespan = getattr(request.state, "of_lifespan", None)
        return [request.app.state.of_app, of_lifespan]


def living_app() -> Any:
    return serve.deployment(user_config={"a": 1}, graceful_shutdown_wait_loop_s=0.1)(Living).bind()


@scenario("Lifespan", None)
def constructor_startup_configuration_health_then_shutdown_and_del(it: Client) -> Any:
    it.deploy(living_app(), "living")
    it.forget("living")
    return wait_for_notes("lifespan", 6)


def living_state() -> Any:
    @asynccontextmanager
    async def lived(app: FastAPI) -> Any:
        app.state.of_app = "app state"
        yield {"of_lifespan": "lifespan state"}

    stateful = FastAPI(lifespan=lived)

    class Stateful:
        @stateful.get("/state")
        async def state(self, request: Request) -> list[Any]:
            return [request.app.state.of_app, getattr(request.state, "of_lifespan", None)]

    return serve.deployment(serve.ingress(stateful)(Stateful)).bind()


@scenario("Lifespan", living_state, Deviation("in `request.state`", row="lifespan state"))
def the_state_of_a_lifespan_is_in_the_request(it: Client) -> Any:
    return it.get("/state").json()


def failing_lifespan() -> Any:
    @asynccontextmanager
    async def lived(app: FastAPI) -> Any:
        if app.title:
            raise ValueError("no start")
        yield

    broken = FastAPI(lifespan=lived)
    made = serve.deployment(max_constructor_retry_count=1)
    return made(serve.ingress(broken)(type("Broken", (), {}))).bind()


@scenario("Lifespan", None)
def a_lifespan_that_fails_is_a_start_that_fails(it: Client) -> Any:
    return refused(lambda: it.deploy(failing_lifespan(), "broken"))
