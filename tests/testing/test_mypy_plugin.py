"""`ingress.mypy`: mypy's types and errors for the samples below, line by line.

A comment at the end of a line of a sample is the expected output of mypy for that line: the type
for `reveal_type`, else the error, or its end after `...`. Short names stand for the full names of
types. All samples and the examples are checked in one run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.documents import blocks
from tests.programs import ROOT
from tests.typed import LOGGED, METHODS, Output, check

EXAMPLES = ROOT / "app_examples"
CONFIG = f"""
[mypy]
strict = true
plugins = ingress.mypy
mypy_path = {ROOT}
explicit_package_bases = true
cache_dir = cache
show_error_codes = false

[mypy-ingress.*]
ignore_errors = true

# The samples of the guides have no annotations.
[mypy-app_examples.*]
disallow_untyped_defs = false
disallow_untyped_calls = false

[mypy-ray.*]
ignore_missing_imports = true
follow_imports = skip
"""

SHOP = f"""
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Generic, ParamSpec, TypeVar, overload

from fastapi import FastAPI

import ingress as serve

api = FastAPI()
{LOGGED}


@serve.deployment
class Loud:
{METHODS}

    @overload
    def either(self, value: int) -> str: ...
    @overload
    def either(self, value: str) -> int: ...
    def either(self, value: int | str) -> int | str:
        return value

    def free(self, text):  # Function is missing a type annotation
        return text


class Repository(ABC, Generic[T]):
    @abstractmethod
    def find(self, key: T) -> T: ...


@serve.deployment(num_replicas=2)
class Names(Repository[str]):
    def find(self, key: str) -> str:
        return key


@serve.deployment
class Box(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value

    def get(self) -> T:
        return self.value


@serve.deployment
@serve.ingress(api)
class Web:
    def __init__(
        self,
        loud: serve.DeploymentHandle[Loud],
        times: int,
        others: dict[str, serve.DeploymentHandle["Web"]] | None = None,
    ) -> None:
        self.loud = loud

    @api.get("/")
    async def get(self, text: str) -> str:
        return await self.loud.shout.remote(text)


@serve.deployment
def double(number: int) -> int:
    return 2 * number


@serve.deployment(name="half")
async def half(number: int) -> float:
    return number / 2
"""

DECLARED = """
import ingress as serve
from shop import Box, Loud, Names, Web, double, half

reveal_type(Loud.bind("?"))  # Application[Loud]
reveal_type(Web.bind(Loud.bind(), times=3))  # Application[Web]
reveal_type(Web.options(num_replicas=2))  # Deployment[Web]
reveal_type(Web.options(num_replicas=2).bind(Loud.bind(), 3))  # Application[Web]
reveal_type(Web.name)  # str
reveal_type(Web.max_ongoing_requests)  # int
reveal_type(Web.func_or_class)  # type | FunctionType
reveal_type(Box.bind(1))  # Application[Box[int]]
reveal_type(serve.deployment(Loud))  # Deployment[Loud]
reveal_type(serve.deployment(name="x")(Loud).bind())  # Application[Loud]
reveal_type(double)  # Deployment[def (number: int) -> int]
reveal_type(double.bind())  # Application[def (number: int) -> int]
reveal_type(serve.run(Web.bind(Loud.bind(), 3)))  # DeploymentHandle[Web]
reveal_type(serve.run(double.bind()).remote(1))  # DeploymentResponse[int]
reveal_type(serve.run(half.bind()).remote(1).result())  # float

first = Web.bind(Loud.bind(), 1)
applications = {"first": first}
Web.bind(Loud.bind(), 3, {"first": first})
Web.bind(Loud.bind(), 3, others=applications)
Web.bind(Names.bind(), 3)  # ...expected "DeploymentHandle[Loud] | Application[Loud]"
Web.bind(Loud.bind(), times="3")  # ...type "str"; expected "int"
Web.bind(Loud.bind())  # Missing positional argument "times" in call to "bind" of "Web"
Web.options(num_replicas="two")  # ...expected "int | Literal['auto'] | None"
Web.numreplicas  # A deployment has no attribute or option "numreplicas"
double.bind(1)  # Too many arguments for "bind" of "Deployment"
serve.run(Web)  # ...type "type[Web]"; expected "Application[Never]"


class Other(Web):  # The base class is a deployment; decorate a subclass of the class
    pass


def declared(deployment: serve.Deployment) -> None: ...


declared(Loud)
declared(double)


def test() -> None:
    @serve.deployment
    class Local:
        def __init__(self, size: int) -> None: ...

        def ping(self) -> int:
            return 1

    class Under(Local):  # The base class is a deployment; decorate a subclass of the class
        pass

    reveal_type(serve.run(Local.bind(3)).ping.remote().result())  # int
    Local.bind()  # Missing positional argument "size" in call to "bind" of "Local"
"""

CALLED = """
from collections.abc import Callable
from typing import Protocol

import ingress as serve
from shop import Box, Loud, Names


class Shouting(Protocol):
    def shout(self, text: str) -> str: ...


async def calls(
    loud: serve.DeploymentHandle[Loud],
    later: serve.DeploymentHandle["Later"],
    names: serve.DeploymentHandle[Names],
    box: serve.DeploymentHandle[Box[bytes]],
    shouting: serve.DeploymentHandle[Shouting],
    bare: serve.DeploymentHandle,
    function: serve.DeploymentHandle[Callable[[int], bytes]],
    optional: serve.DeploymentHandle[Loud] | None,
    method: str,
    stream: bool,
) -> None:
    reveal_type(loud.shout)  # DeploymentHandle[def (text: str) -> str]
    reveal_type(loud.shout.remote("a"))  # DeploymentResponse[str]
    reveal_type(await loud.shout.remote("a"))  # str
    reveal_type(loud.shout.remote("a").result(timeout_s=1))  # str
    reveal_type(await loud.whisper.remote("a", times=2))  # bytes
    reveal_type(await loud.whisper.remote(loud.shout.remote(text="a")))  # bytes
    reveal_type(await loud.remote(1))  # float
    reveal_type(await loud.checked.remote("a", 1, 2))  # bool
    reveal_type(await loud.version.remote())  # str
    reveal_type(await loud.either.remote(1))  # str
    reveal_type(await loud.either.remote("1"))  # int
    reveal_type(await loud.free.remote(1))  # Any
    reveal_type(await later.twice.remote(1))  # int
    reveal_type(await names.find.remote("a"))  # str
    reveal_type(await box.get.remote())  # bytes
    reveal_type(await shouting.shout.remote("a"))  # str
    reveal_type(await bare.anything.remote("a"))  # Any
    reveal_type(await function.remote(1))  # bytes
    reveal_type(await (optional or loud).shout.remote("a"))  # str
    reveal_type(loud.app_name)  # str

    loud.shout.remote(1)  # ...type "int"; expected "str | DeploymentResponse[str]"
    loud.shout.remote(loud.remote(1))  # ...expected "str | DeploymentResponse[str]"
    loud.free.remote(1, 2)  # Too many arguments for "free"
    loud.shout.remote()  # Missing positional argument "text" in call to "shout" of "Loud"
    loud.shoutt.remote("a")  # "Loud" has no attribute "shoutt"; maybe "shout"?
    names.remote()  # "Names" not callable

    reveal_type(loud.options(method_name="shout"))  # DeploymentHandle[def (text: str) -> str]
    reveal_type(loud.options(multiplexed_model_id="m").shout.remote("a"))  # DeploymentResponse[str]
    reveal_type(loud.options(method_name=method).remote("a"))  # Any
    reveal_type(loud.options(stream=stream).letters.remote("a"))  # Any
    loud.options(method_name="shoutt")  # "Loud" has no attribute "shoutt"; maybe "shout"?


async def streams(loud: serve.DeploymentHandle[Loud], bare: serve.DeploymentHandle) -> None:
    streaming = loud.options(stream=True)
    reveal_type(streaming.letters.remote("a"))  # DeploymentResponseGenerator[str]
    async for code in streaming.codes.remote("a"):
        reveal_type(code)  # int
    for letter in loud.letters.options(stream=True, session_id="s").remote("a"):
        reveal_type(letter)  # str
    reveal_type(streaming.options(stream=False).shout.remote("a"))  # DeploymentResponse[str]
    again = streaming.options(session_id="s")
    reveal_type(again.letters.remote("a"))  # DeploymentResponseGenerator[str]
    reveal_type(bare.options(stream=True).words.remote())  # DeploymentResponseGenerator[Any]
    loud.letters.remote("a")  # The method returns a generator; call it with options(stream=True)
    streaming.shout.remote("a")  # options(stream=True) is for methods that return a generator


@serve.deployment
class Later:
    def twice(self, number: int) -> int:
        return 2 * number
"""

BATCHED = """
from collections.abc import AsyncIterator, Iterator, Sequence

import ingress as serve


@serve.deployment
class Model:
    @serve.batch
    async def length(self, texts: list[str]) -> list[int]:
        return [len(each) for each in texts]

    @serve.batch(max_batch_size=8)
    def scale(self, numbers: Sequence[int], factors: list[float] = [1.0]) -> list[float]:
        return [a * b for a, b in zip(numbers, factors)]

    @serve.batch(batch_wait_timeout_s=0.1)
    async def words(self, texts: list[str]) -> AsyncIterator[list[bytes | type[StopIteration]]]:
        yield [StopIteration for _ in texts]

    @serve.batch
    async def __call__(self, numbers: list[int]) -> list[str]:
        return [str(each) for each in numbers]

    @serve.multiplexed(max_num_models_per_replica=2)
    async def model(self, model_id: str) -> dict[str, int]:
        reveal_type(await self.length("abc"))  # int
        reveal_type(await self.scale(1, factors=2.0))  # float
        async for word in self.words("a"):
            reveal_type(word)  # bytes
        self.length.set_max_batch_size(4)
        await self.length(["abc"])  # ...type "list[str]"; expected "str"
        await self.scale(1, 2.0, 3)  # Too many arguments for "__call__" of "Batched"
        return {}

    async def use(self) -> None:
        reveal_type(await self.model("en"))  # dict[str, int]


@serve.batch(max_batch_size=2)
async def alone(xs: list[int], ys: list[str]) -> list[tuple[int, str]]:
    return list(zip(xs, ys))


async def calls(model: serve.DeploymentHandle[Model]) -> None:
    reveal_type(await model.length.remote("abc"))  # int
    reveal_type(await model.scale.remote(1, 2.0))  # float
    reveal_type(await model.model.remote("en"))  # dict[str, int]
    reveal_type(await model.remote(1))  # str
    for word in model.words.options(stream=True).remote("a"):
        reveal_type(word)  # bytes
    reveal_type(await alone(1, "a"))  # tuple[int, str]
    model.length.remote(["abc"])  # ...expected "str | DeploymentResponse[str]"
"""

SAMPLES = {"shop": SHOP, "declared": DECLARED, "called": CALLED, "batched": BATCHED}
SHORT = re.compile(r"\b(?:builtins|fastapi|ingress|shop|types|called|batched)\.(?:[a-z_]+\.)*")


def mypy(folder: Path, *targets: str) -> Output:
    """Return the messages of mypy for each line of each file."""
    (folder / "mypy.ini").write_text(CONFIG)
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", *targets],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for line in ran.stdout.splitlines():
        if match := re.match(r"(.+?):(\d+): (?:error|note): (.*)", line):
            text = re.sub(r'^Revealed type is "(.*)"$', r"\1", match[3])
            name = Path(match[1]).name
            found[name].setdefault(int(match[2]), SHORT.sub("", text))
        else:
            assert line.startswith(("Found ", "Success")), line
    return found


def is_meant(text: str, expected: str) -> bool:
    end = expected.removeprefix("...")
    return text.endswith(end) if end != expected else text == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("typed")
    for name, source in SAMPLES.items():
        (folder / f"{name}.py").write_text(source)
    for number, (language, text) in enumerate(blocks(ROOT / "docs" / "typing.md")):
        if language == "python":
            (folder / f"block{number}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def output(folder: Path) -> Output:
    return mypy(folder, ".", str(EXAMPLES))


def test_a_module_of_deployments_is_strictly_typed(output: Output) -> None:
    check(output["shop.py"], SHOP, is_meant)


def test_a_decorated_class_is_a_deployment(output: Output) -> None:
    check(output["declared.py"], DECLARED, is_meant)


def test_calls_by_handle_have_the_types_of_the_methods(output: Output) -> None:
    check(output["called.py"], CALLED, is_meant)


def test_a_batched_method_takes_one_item_and_returns_one_result(output: Output) -> None:
    check(output["batched.py"], BATCHED, is_meant)


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_has_no_error(output: Output, name: str) -> None:
    assert output.get(name, {}) == {}


def test_the_code_of_the_page_has_the_types_that_it_says(folder: Path, output: Output) -> None:
    pages = sorted(folder.glob("block*.py"))
    assert pages
    for path in pages:
        check(output.get(path.name, {}), path.read_text(), is_meant)


def test_types_are_the_same_from_the_cache(folder: Path, output: Output) -> None:
    for name in ("declared", "called"):
        (folder / f"{name}.py").write_text(SAMPLES[name] + "\n")
    again = mypy(folder, ".", str(EXAMPLES))

    assert again == output
