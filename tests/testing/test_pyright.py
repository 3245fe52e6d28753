"""Types without a plugin: Pyright's types and errors for the samples below, line by line.

A comment at the end of a line of a sample is in the output of Pyright for that line; each other
line has none. Full names are not shown. All samples and documents are checked in one run, strictly.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.documents import blocks
from tests.programs import ROOT
from tests.servers import INGRESS
from tests.typed import LOGGED, METHODS, Output, check

pytest.importorskip("basedpyright", reason="`make check` installs it")

SHOP = f"""
from collections.abc import AsyncIterator, Callable, Iterator
from typing import ParamSpec, Protocol, TypeVar

from fastapi import FastAPI

import ingress as serve

api = FastAPI()
{LOGGED}


class Base:
    def inherited(self, number: int) -> str:
        return str(number)


@serve.deployment(num_replicas=2)
class Loud(Base):
    LIMIT = 3

{METHODS}

    @serve.batch
    async def length(self, texts: list[str]) -> list[int]:
        return [len(each) for each in texts]


class Plain:
    def shout(self, text: bytes) -> bytes:
        return text


class Plainer(Plain):
    def shout(self, text: bytes, times: int = 1) -> bytes:
        return text * times

    def whisper(self) -> int:
        return 1


class Shouting(Protocol):
    def shout(self, text: str) -> str: ...


@serve.deployment
@serve.ingress(api)
class Web:
    def __init__(
        self,
        loud: serve.DeploymentHandle["Loud"],
        times: int,
        others: "dict[str, serve.DeploymentHandle[Web]] | None" = None,
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


@serve.deployment
class Uses:
    def __init__(
        self,
        plain: serve.DeploymentHandle[Plain],
        shouting: serve.DeploymentHandle[Shouting],
        function: serve.DeploymentHandle[Callable[[int], int]],
        any: serve.DeploymentHandle,
    ) -> None: ...


plain = serve.deployment(Plain)
plainer = serve.deployment(num_replicas=2)(Plainer)
uses = Uses.bind(plain.bind(), Loud.bind(), double.bind(), Loud.bind())
app = Web.bind(Loud.bind(), 2)
everything = Uses.bind(plainer.bind(), Loud.bind(), double.bind(), plain.bind())
"""

DECLARED = """
from typing import reveal_type

import ingress as serve
from shop import Loud, Uses, Web, double, half

reveal_type(Loud.bind("?"))  # Application[Deployed[type[Loud]]]
reveal_type(Web.options(num_replicas=2).bind(Loud.bind(), 3))  # Application[Deployed[type[Web]]]
reveal_type(Web.bind(Loud.bind(), 1, {"b": Web.bind(Loud.bind(), 2)}))  # Application[
reveal_type(Web.name)  # "str"
reveal_type(double.options(num_replicas=2).bind())  # Application[(number: int) -> int]
reveal_type(serve.run(double.bind()).remote(1))  # DeploymentResponse[int]
reveal_type(serve.run(half.bind()).remote(1).result())  # "float"
reveal_type(serve.run(Loud.bind()).remote(1).result())  # "float"
reveal_type(Loud.LIMIT)  # "Any"

Loud.bind(1)  # "Literal[1]" cannot be assigned to parameter "mark" of type "str"
Web.bind(Uses.bind, times=3)  # parameter "loud" of type "DeploymentHandle[Deployed[type[Loud]]]"
Web.bind(Web.bind(Loud.bind(), 3), 3)  # "type[Web]" is not a subtype of "type[Loud]"
Web.bind(Loud.bind(), times="3")  # parameter "times" of type "int"
Web.bind(Loud.bind())  # Argument missing for parameter "times"
Web.options(num_replicas="two")  # parameter "num_replicas" of type "int | Literal['auto'] | None"
Web.options(num_replica=2)  # No parameter named "num_replica"
double.bind(1)  # Expected 0 positional arguments
serve.run(Web)  # "type[Deployed[type[Web]]]" cannot be assigned to parameter "target"
Web(Loud.bind())  # parameter "deployments_cannot_be_constructed_directly" of type "Never"


class Other(Web):  # is marked final and cannot be subclassed
    pass


def bound(deployment: serve.Deployment) -> serve.Application:
    return deployment.options(num_replicas=2).bind(1)


bound(Loud)
bound(double)
"""

CALLED = """
from typing import Any, reveal_type

import ingress as serve
from shop import Loud, Plain, Plainer, Shouting, Web


async def calls(
    loud: serve.DeploymentHandle[Loud],
    web: serve.DeploymentHandle[Web],
    plain: serve.DeploymentHandle[Plain],
    plainer: serve.DeploymentHandle[Plainer],
    shouting: serve.DeploymentHandle[Shouting],
    bare: serve.DeploymentHandle,
    optional: serve.DeploymentHandle[Loud] | None,
    value: Any,
    stream: bool,
) -> None:
    reveal_type(loud.shout)  # DeploymentHandle[(text: str) -> str]
    reveal_type(loud.shout.remote("a"))  # DeploymentResponse[str]
    reveal_type(await loud.shout.remote(text="a"))  # "str"
    reveal_type(loud.shout.remote(value).result(timeout_s=1))  # "str"
    reveal_type(await loud.whisper.remote("a", times=2))  # "bytes"
    reveal_type(await loud.whisper.remote(loud.shout.remote("a"), times=2))  # "bytes"
    reveal_type(await loud.remote(1))  # "float"
    reveal_type(await loud.checked.remote("a", 1, 2))  # "bool"
    reveal_type(await loud.version.remote())  # "str"
    reveal_type(await loud.inherited.remote(1))  # "str"
    reveal_type(await loud.length.remote("a"))  # "int"
    reveal_type(await web.get.remote("a"))  # "str"
    reveal_type(await plain.shout.remote(b"a"))  # "bytes"
    reveal_type(await plainer.shout.remote(b"a", 2))  # "bytes"
    reveal_type(await plainer.whisper.remote())  # "int"
    reveal_type(await shouting.shout.remote("a"))  # "Any"
    reveal_type(await bare.anything.remote(value))  # "Any"
    reveal_type(await (optional or loud).shout.remote("a"))  # "str"
    reveal_type(loud.app_name)  # "str"

    loud.shout.remote(1)  # parameter "a" of type "str | DeploymentResponse[str]"
    loud.shout.remote(loud.remote(1))  # parameter "a" of type "str | DeploymentResponse[str]"
    loud.shout.remote()  # No overloads for "remote" match
    loud.shout.remote("a", "b")  # No overloads for "remote" match
    loud.remote("1")  # parameter "a" of type "int | DeploymentResponse[int]"
    loud.shoutt.remote("a")  # Cannot access attribute "remote" for class "UnknownMethod"
    plain.whisper.remote()  # Cannot access attribute "remote" for class "UnknownMethod"
    plain.remote()  # Cannot access attribute "remote" for class "DeploymentHandle[Plain]"
    web.remote()  # Cannot access attribute "remote" for class
    await loud.letters.remote("a")  # "CallWithStreamTrue" is not awaitable

    reveal_type(loud.options(session_id="m").shout.remote("a"))  # DeploymentResponse[str]
    reveal_type(loud.options(method_name="shout").remote("a"))  # "Any"
    reveal_type(loud.options(stream=stream).letters.remote("a"))  # "Any"
    loud.options(streams=True)  # No overloads for "options" match
    loud.options(priority=1)  # No overloads for "options" match


async def streams(loud: serve.DeploymentHandle[Loud], bare: serve.DeploymentHandle) -> None:
    streaming = loud.options(stream=True)
    reveal_type(streaming.letters.remote("a"))  # DeploymentResponseGenerator[str]
    async for code in streaming.codes.remote("a"):
        reveal_type(code)  # "int"
    for letter in loud.letters.options(stream=True, session_id="s").remote("a"):
        reveal_type(letter)  # "str"
    reveal_type(streaming.options(stream=False).shout.remote("a"))  # DeploymentResponse[str]
    again = streaming.options(session_id="s")
    reveal_type(again.letters.remote("a"))  # DeploymentResponseGenerator[str]
    reveal_type(bare.options(stream=True).words.remote())  # DeploymentResponseGenerator[Any]
    streaming.shout.remote("a")  # Cannot access attribute "remote" for class "StreamingHandle
"""

# As an editor shows it before `ingress stubs` has run.
WITHOUT = """
from typing import reveal_type

import ingress as serve


@serve.deployment
class Loud:
    def shout(self, text: str) -> str:
        return text

    def __call__(self, number: int) -> int:
        return number


async def calls(loud: serve.DeploymentHandle[Loud]) -> None:
    reveal_type(await loud.remote(1))  # "int"
    reveal_type(await loud.shout.remote("a"))  # "Any"
    reveal_type(await loud.options(stream=True).shout.remote("a").__anext__())  # "Any"
    loud.remote("1")  # parameter "a" of type "int | DeploymentResponse[int]"
"""


def pyright(folder: Path) -> Output:
    """Return the messages of Pyright for each line of each file."""
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict"}))
    command = ["basedpyright", "--pythonpath", sys.executable, "--outputjson"]
    ran = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for each in json.loads(ran.stdout)["generalDiagnostics"]:
        if each.get("rule") == "reportUnknownMemberType" or each["severity"] == "warning":
            continue  # follows from another error of the line
        lines, number = found[Path(each["file"]).name], each["range"]["start"]["line"] + 1
        lines[number] = f"{lines.get(number, '')}{each['message']}\n"
    return found


def is_meant(text: str, expected: str) -> bool:
    return bool(expected) and expected in text


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Output:
    folder = tmp_path_factory.mktemp("typed")
    for name, source in {"shop": SHOP, "declared": DECLARED, "called": CALLED}.items():
        (folder / f"{name}.py").write_text(source)
    for page in (ROOT / "README.md", ROOT / "docs" / "typing.md"):
        for language, text in blocks(page):
            if language == "python" and (named := re.match(r"# (\w+\.py)", text)):
                (folder / named[1]).write_text(text)
    targets = ["shop:app", "shop:everything", "loudness:app", "both:app"]
    command = [*INGRESS, "stubs", *targets, "-o", "ingress_methods.pyi"]
    made = subprocess.run(command, cwd=folder, capture_output=True, timeout=60, check=False)
    assert made.returncode == 0, made.stderr
    return pyright(folder)


def test_a_module_of_deployments_is_strictly_typed(output: Output) -> None:
    check(output.get("shop.py", {}), SHOP, is_meant)


def test_a_decorated_class_is_a_deployment(output: Output) -> None:
    check(output["declared.py"], DECLARED, is_meant)


def test_calls_by_handle_have_the_types_of_the_methods(output: Output) -> None:
    check(output["called.py"], CALLED, is_meant)


def test_the_code_of_the_page_has_errors_where_it_says_so(output: Output) -> None:
    text = next(text for _, text in blocks(ROOT / "docs" / "typing.md") if "# loudness" in text)

    assert [*output["loudness.py"]] == [
        number for number, line in enumerate(text.splitlines(), start=1) if "  # " in line
    ]


def test_other_documents_and_the_written_module_have_no_error(output: Output) -> None:
    assert {*output} == {"declared.py", "called.py", "loudness.py"}


def test_calls_of_the_deployment_itself_need_no_written_module(tmp_path: Path) -> None:
    (tmp_path / "without.py").write_text(WITHOUT)

    check(pyright(tmp_path)["without.py"], WITHOUT, is_meant)
