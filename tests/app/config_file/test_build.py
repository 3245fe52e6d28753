"""`declaration.build`: a bound application becomes named deployments with slots for handles."""

from __future__ import annotations

import inspect
import logging
import threading
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from ingress.app.declaration.build import BuiltApplication, BuiltDeployment, HandleSlot, build, fill
from ingress.app.declaration.declaration import Application, deployment
from ingress.exceptions import OptionNotActedOnWarning, RayServeException

Pair = namedtuple("Pair", "left right")


class TakesAll:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...


Node = deployment(name="Node")(TakesAll)


@deployment
def leaf() -> None: ...


def names(built: BuiltApplication) -> list[str]:
    return [each.name for each in built.deployments]


def handles(each: BuiltDeployment) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return fill(each.init_args, each.init_kwargs, lambda name: f"handle of {name}")


def test_an_application_alone_is_its_own_ingress() -> None:
    built = build(Node.bind(1, key="value"), "app")

    assert (built.name, names(built), built.ingress.name) == ("app", ["Node"], "Node")
    assert (built.ingress.init_args, built.ingress.init_kwargs) == ((1,), {"key": "value"})


@pytest.mark.parametrize(
    ("wrap", "slotted"),
    [
        pytest.param(lambda node: node, HandleSlot("leaf"), id="alone"),
        pytest.param(lambda node: [1, node], [1, HandleSlot("leaf")], id="list"),
        pytest.param(lambda node: (node,), (HandleSlot("leaf"),), id="tuple"),
        pytest.param(lambda node: {"a": node}, {"a": HandleSlot("leaf")}, id="dict"),
        pytest.param(lambda node: {node}, {HandleSlot("leaf")}, id="set"),
        pytest.param(lambda node: Pair(node, 1), Pair(HandleSlot("leaf"), 1), id="namedtuple"),
        pytest.param(
            lambda node: {"a": [({"b": node},)]}, {"a": [({"b": HandleSlot("leaf")},)]}, id="deep"
        ),
    ],
)
def test_a_slot_stands_where_an_application_stood(wrap: Any, slotted: Any) -> None:
    built = build(Node.bind(wrap(leaf.bind()), key=wrap(leaf.options(name="other").bind())), "app")

    assert names(built) == ["leaf", "other", "Node"]
    assert built.ingress.init_args == (slotted,)
    assert type(built.ingress.init_args[0]) is type(slotted)
    assert "other" in str(built.ingress.init_kwargs["key"])


def test_fill_puts_handles_into_the_slots_and_changes_nothing_of_the_users() -> None:
    node, plain = leaf.bind(), {"rate": 1}
    args = [node, plain]
    built = build(Node.bind(args, key={"a": node}), "app")

    assert handles(built.ingress) == (
        (["handle of leaf", plain],),
        {"key": {"a": "handle of leaf"}},
    )
    assert args == [node, plain]
    assert built.ingress.init_args == ([HandleSlot("leaf"), plain],)


def test_each_fill_makes_new_containers_and_shares_what_has_no_slot() -> None:
    plain = [1, 2]
    built = build(Node.bind([leaf.bind()], plain), "app")
    (first, shared), _ = handles(built.ingress)
    (second, also_shared), _ = handles(built.ingress)

    assert first is not second
    assert shared is also_shared is plain


def test_the_same_node_twice_is_one_deployment() -> None:
    node = leaf.bind()
    built = build(Node.bind(node, [node], key=Node.options(name="middle").bind(node)), "app")

    assert names(built) == ["leaf", "middle", "Node"]
    assert built.ingress.init_args == (HandleSlot("leaf"), [HandleSlot("leaf")])


def test_nodes_of_one_name_are_numbered_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    taken = leaf.options(name="leaf_1").bind()
    with caplog.at_level(logging.WARNING, logger="ingress"):
        built = build(Node.bind(taken, leaf.bind(), leaf.bind(), Node.bind()), "app")

    assert names(built) == ["leaf_1", "leaf", "leaf_2", "Node", "Node_1"]
    assert built.ingress.name == "Node_1"
    assert [record.getMessage().split(". ")[0] for record in caplog.records] == [
        "application 'app' has several deployments named 'leaf'; this one is now 'leaf_2'",
        "application 'app' has several deployments named 'Node'; this one is now 'Node_1'",
    ]


def test_children_come_before_parents() -> None:
    def named(name: str, *children: Application) -> Application:
        return Node.options(name=name).bind(*children)

    shared = named("d")
    built = build(named("a", named("b", shared), named("c", shared, named("e"))), "app")

    assert names(built) == ["d", "b", "e", "c", "a"]


def test_building_twice_gives_the_same() -> None:
    application = Node.bind(leaf.bind())

    assert names(build(application, "one")) == names(build(application, "two"))


def test_a_container_inside_itself_is_a_value_error() -> None:
    cycle: list[Any] = []
    cycle.append({"again": cycle})
    assert build(Node.bind(cycle), "app").ingress.init_args[0] is cycle

    cycle.append(leaf.bind())
    with pytest.raises(ValueError, match="contain themselves"):
        build(Node.bind(cycle), "app")


# In objects of the user's.


@dataclass(frozen=True)
class Settings:
    model: Any
    rate: object


class Slotted:
    __slots__ = ("__model", "unset")

    def __init__(self, model: Any) -> None:
        self.__model = model

    @property
    def model(self) -> Any:
        return self.__model


class Checked(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: Any
    rate: object


class Linked:
    """An object that refers to itself, and to one that cannot be pickled."""

    def __init__(self, model: Any) -> None:
        self.me = self
        self.lock = threading.Lock()
        self.inner = {"settings": [Settings(model, self.lock)]}

    @property
    def model(self) -> Any:
        assert self.me is self
        assert self.inner["settings"][0].rate is self.lock
        return self.inner["settings"][0].model


@pytest.mark.parametrize(
    "make",
    [
        lambda model: Settings(model, 1),
        Slotted,
        lambda model: Checked(model=model, rate=1),
        Linked,
        lambda model: SimpleNamespace(model=model),
    ],
    ids=["dataclass", "slots", "pydantic", "linked", "namespace"],
)
def test_an_application_in_an_object_of_the_users_is_deployed_and_a_handle_there(make: Any) -> None:
    node, plain = leaf.bind(), Settings("no application", object())
    given = make(node)
    built = build(Node.bind(given, [plain], key=given), "app")
    (first, (same,)), named = handles(built.ingress)
    (second, _), _ = handles(built.ingress)

    assert names(built) == ["leaf", "Node"]
    assert type(first) is type(given)
    assert (first.model, named["key"] is first) == ("handle of leaf", True)
    assert given.model is node, "the user's own object stays as it is"
    assert second is not first, "each replica has its own"
    assert same is plain


def test_the_rest_of_an_object_that_holds_an_application_is_the_users_own() -> None:
    rate = object()
    (found,), _ = handles(build(Node.bind(Settings(leaf.bind(), rate)), "app").ingress)

    assert found == Settings("handle of leaf", rate)
    assert found.rate is rate


class Exported:
    """An object that says how it is pickled, without the attribute."""

    def __init__(self) -> None:
        self.cache = leaf.bind()

    def __reduce__(self) -> Any:
        return Exported, ()


def test_an_object_that_says_how_it_is_pickled_is_not_looked_into() -> None:
    given = Exported()
    built = build(Node.bind(given), "app")

    assert (names(built), built.ingress.init_args[0] is given) == (["Node"], True)


def test_a_holder_that_cannot_be_copied_is_a_type_error_that_says_what_to_do() -> None:
    class Held(Exception):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

    with pytest.raises(TypeError, match="type Held holds an application and cannot be copied"):
        build(Node.bind(Held(leaf.bind())), "app")


def test_an_application_among_its_own_arguments_is_a_value_error() -> None:
    arguments: list[Any] = []
    application = Node.bind(arguments)
    arguments.append(application)

    with pytest.raises(ValueError, match="makes a cycle: Node -> Node;"):
        build(application, "app")


def test_user_config_without_reconfigure_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="deployment 'Node' is a class missing reconfigure method"):
        build(Node.options(user_config={"a": 1}).bind(), "app")
    with pytest.raises(ValueError, match=r"deployment 'leaf' is a function, .*missing reconfigure"):
        build(Node.bind(leaf.options(user_config={"a": 1}).bind()), "app")


def test_user_config_with_reconfigure_is_built() -> None:
    class Configured:
        def reconfigure(self, user_config: dict[str, Any]) -> None: ...

    application = deployment(user_config={"a": 1})(Configured).bind()

    assert names(build(application, "app")) == ["Configured"]


def test_more_than_one_ingress_class_is_refused_in_the_words_of_ray() -> None:
    class WithApp:
        __ingress_spec__ = object()

        def __init__(self, *args: Any) -> None: ...

    class Other(WithApp): ...

    child = deployment(Other).bind()
    assert build(child, "app").ingress.is_asgi
    with pytest.raises(
        RayServeException, match='Found multiple FastAPI deployments in application "app"'
    ):
        build(deployment(WithApp).bind(child), "app")


def test_one_warning_lists_every_option_without_effect() -> None:
    child = leaf.options(ray_actor_options={"num_gpus": 1}, max_queued_requests=3).bind()
    options = {"num_cpus": 2, "memory": 9}
    application = Node.options(num_replicas="auto", ray_actor_options=options).bind(child)

    with pytest.warns(OptionNotActedOnWarning) as caught:
        assert [build(application, name).name for name in ("app", "again")] == ["app", "again"]

    has = "has options without effect in this process: "
    does = "; leave them out, or run it with engine='ray'"
    own = ', or add isolation="process" for num_gpus and env_vars'
    assert [str(each.message) for each in caught] == [
        f"deployment 'leaf' {has}ray_actor_options={{'num_gpus': 1}}{does}{own}",
        f"deployment 'Node' {has}ray_actor_options={{'memory': 9}}{does}",
    ]
    assert [(each.filename, each.lineno) for each in caught] == [
        (__file__, inspect.getsourcelines(each)[1]) for each in (leaf.func_or_class, TakesAll)
    ]
