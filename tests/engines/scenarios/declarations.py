"""Declarations of deployments, and the errors for mistakes in them, before anything runs."""

from typing import Any

from fastapi import FastAPI

from tests.engines.api import serve
from tests.engines.client import Client, outcome, refused
from tests.engines.suite import Deviation, scenario

DEPLOYMENT = "Declaring a deployment"


class Plain:
    def __init__(self, word: str = "plain") -> None:
        self.word = word

    async def __call__(self, *_: Any) -> str:
        return self.word


def decorated(**options: Any) -> Any:
    deployment: Any = serve.deployment
    return deployment(**options)(Plain)


@scenario(DEPLOYMENT)
def a_deployment_has_the_name_of_its_class_unless_given(it: Client) -> Any:
    return [serve.deployment(Plain).name, decorated().name, decorated(name="Other").name]


@scenario(DEPLOYMENT)
def options_make_another_deployment(it: Client) -> Any:
    made: Any = decorated(num_replicas=2, max_ongoing_requests=3, user_config={"a": 1})
    other = made.options(name="Other", num_replicas=4)
    return [
        [made.name, made.num_replicas, made.max_ongoing_requests],
        [other.name, other.num_replicas, other.max_ongoing_requests, other.user_config],
    ]


@scenario(DEPLOYMENT)
def an_unknown_option_is_a_type_error_that_names_it(it: Client) -> Any:
    return [
        refused(lambda: decorated(replicas=2), "replicas"),
        refused(lambda: decorated(route_prefix="/x"), "route_prefix"),
        refused(lambda: decorated().options(replicas=2), "replicas"),
    ]


@scenario(DEPLOYMENT, None, Deviation("a deprecated alias", row="`max_concurrent_queries`"))
def the_older_name_of_max_ongoing_requests(it: Client) -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outcome(lambda: decorated(max_concurrent_queries=3).name)


@scenario(DEPLOYMENT)
def a_limit_that_is_none_is_told(it: Client) -> Any:
    return [
        refused(lambda: decorated(max_ongoing_requests=None), "must be non-null"),
        refused(lambda: decorated(max_ongoing_requests=0)),
        refused(lambda: decorated(max_queued_requests=0), "-1 (no limit)", "positive integer"),
        refused(lambda: decorated(num_replicas=0)),
    ]


@scenario(DEPLOYMENT)
def a_number_of_replicas_beside_autoscaling_is_refused(it: Client) -> Any:
    config = {"min_replicas": 1, "max_replicas": 2}
    return refused(
        lambda: decorated(num_replicas=2, autoscaling_config=config),
        "Manually setting num_replicas is not allowed when autoscaling_config is provided",
    )


@scenario(DEPLOYMENT)
def an_autoscaling_range_must_be_one(it: Client) -> Any:
    return refused(
        lambda: decorated(autoscaling_config={"min_replicas": 3, "max_replicas": 2}),
        "must be greater than or equal to min_replicas",
    )


@scenario(DEPLOYMENT)
def a_name_with_a_hash_is_refused(it: Client) -> Any:
    return refused(lambda: decorated(name="a#b"), "#")


@scenario(DEPLOYMENT)
def a_deployment_is_not_called(it: Client) -> Any:
    return refused(lambda: decorated()(), "cannot be constructed directly")


@scenario(DEPLOYMENT)
def a_function_takes_no_constructor_arguments(it: Client) -> Any:
    def function() -> None: ...

    declared: Any = serve.deployment(function)
    return refused(lambda: declared.bind(1), "init_args not supported for function")


@scenario(DEPLOYMENT)
def what_is_no_class_and_no_function_is_no_deployment(it: Client) -> Any:
    return outcome(lambda: serve.deployment(Plain())) in (
        {"raised": "TypeError"},
        {"raised": "AttributeError"},
    )


@scenario(
    DEPLOYMENT, None, Deviation("a mistake is told where it is made", columns=("local", "ray"))
)
def arguments_that_the_constructor_does_not_take_are_told_at_bind(it: Client) -> Any:
    return outcome(lambda: decorated().bind("a", "b") and "bound")


@scenario("Running, finding and deleting applications")
def run_takes_an_application_with_a_name(it: Client) -> Any:
    run: Any = serve.run
    made = decorated()
    return [
        refused(lambda: run(made), "expects an `Application`"),
        refused(lambda: run(Plain), "expects an `Application`"),
        refused(lambda: run(made.bind(), name=""), "must a non-empty string"),
    ]


@scenario("Prefixes")
def a_prefix_that_is_none_is_told(it: Client) -> Any:
    made = decorated().bind()
    return [
        refused(lambda: serve.run(made, route_prefix="x"), "must start with a forward slash"),
        refused(lambda: serve.run(made, route_prefix="/x/"), "may not end with a trailing '/'"),
        refused(lambda: serve.run(made, route_prefix="/{x}"), "may not contain wildcards"),
    ]


@scenario("FastAPI classes")
def mistakes_with_ingress_are_told(it: Client) -> Any:
    class Callable:
        def __call__(self) -> None: ...

    ingress: Any = serve.ingress
    return [
        refused(lambda: ingress(FastAPI())(lambda: 1), "must be used with a class"),
        refused(lambda: ingress(FastAPI())(Callable), "may not have __call__ method"),
        refused(lambda: ingress()(type("NoHook", (), {})), "__serve_build_asgi_app__"),
    ]


@scenario("FastAPI classes", None, Deviation("the right order is told, as a mistake in types"))
def the_decorators_in_the_wrong_order_are_told(it: Client) -> Any:
    ingress: Any = serve.ingress
    return refused(lambda: ingress(FastAPI())(decorated()), "@serve.ingress")


@scenario("FastAPI classes")
def an_endpoint_without_self_is_told(it: Client) -> Any:
    def decorate() -> None:
        app = FastAPI()

        class NoSelf:
            @app.get("/")
            def endpoint() -> None: ...  # type: ignore[misc]

        serve.ingress(app)(NoSelf)

    return refused(decorate, "self", "first argument")


@scenario("FastAPI classes", None, Deviation("as written", row="subclass of an ingress class"))
def a_subclass_of_an_ingress_class_may_have_a_plain_constructor(it: Client) -> Any:
    def decorate() -> str:
        app = FastAPI()
        base = serve.ingress(app)(type("Base", (), {}))

        def init(self: Any) -> None: ...

        return type("Sub", (base,), {"__init__": init}).__name__

    return outcome(decorate)


@scenario("`@batch`")
def mistakes_with_batch_are_told(it: Client) -> Any:
    batch: Any = serve.batch

    def plain(values: list[int]) -> None: ...

    return [
        refused(lambda: batch(max_batch_size=0), "max_batch_size must be an integer >= 1"),
        refused(lambda: batch(max_batch_size="3")),
        refused(lambda: batch(batch_wait_timeout_s=-1), "batch_wait_timeout_s"),
        refused(lambda: batch(max_concurrent_batches=0), "max_concurrent_batches"),
        refused(lambda: batch(batch_size_fn=3), "batch_size_fn"),
    ]


@scenario(
    "`@batch`", None, Deviation("runs in threads", row="`@batch` on a `def`, a `def` generator")
)
def a_def_may_be_decorated_with_batch(it: Client) -> Any:
    def plain(values: list[int]) -> list[int]:
        return values

    return outcome(lambda: callable(serve.batch(plain)))


@scenario(
    "`@batch`", None, Deviation("as with parentheses", row="a bare `@batch` on an async generator")
)
def an_async_generator_may_be_decorated_bare(it: Client) -> Any:
    async def stream(values: list[int]) -> Any:
        yield values

    return outcome(lambda: callable(serve.batch(stream)))
