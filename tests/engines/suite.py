"""Scenarios: small applications, observed by a client, on several engines.

The name of a scenario function is the sentence it proves. The function gets a `Client` and returns
a plain value, which must be the same in each column, at each value of the flag. An intended
difference is declared with a `Deviation`. A declared deviation that does not occur is a failure,
and so is an undeclared one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.engines.client import Client

COLUMNS = ("local", "ray", "native")
ORACLE = "native"
FLAGS = "01"
FEATURES = (
    "Declaring a deployment",
    "Running, finding and deleting applications",
    "Statuses over time",
    "Composition",
    "FastAPI classes",
    "Routers in a FastAPI class",
    "Apps that several classes share",
    "Apps made in the replica",
    "Other ASGI apps",
    "Lifespan",
    "Where a `def` runs",
    "A `def` on the event loop",
    "Where FastAPI endpoints run",
    "Where an `async def` runs",
    "A `def` that returns an awaitable",
    "Streams",
    "Mistakes with streams",
    "Cancellation",
    "`max_ongoing_requests`",
    "`max_queued_requests`",
    "Results and errors of handles",
    "Responses as arguments",
    "Methods of handles",
    "Plain deployments over HTTP",
    "Request ids, deadlines and clients that leave",
    "Routes and health",
    "Prefixes",
    "WebSockets",
    "`@batch`",
    "`@multiplexed`",
    "What code knows of its replica and request",
    "`user_config`",
    "Health checks",
    "Start and stop",
    "Flags",
    "Jobs",
    "Examples",
)
"""The subjects of scenarios, in the order of the page."""
Factory = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Deviation:
    """The reason why `columns` differ from the oracle at these values of the flag.

    `row` is a cell of the first column of docs/deviations.md. Without `is_supported` it is missing.
    """

    because: str
    row: str = ""
    columns: tuple[str, ...] = ("local", "ray")
    flags: str = FLAGS
    is_supported: bool = True


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario. `feature` is one of `FEATURES`; `app` builds the application."""

    name: str
    feature: str
    app: Factory | None
    observe: Callable[[Client], Any]
    deviations: tuple[Deviation, ...]
    columns: tuple[str, ...]
    flags: str

    @property
    def module(self) -> str:
        return self.observe.__module__.rpartition(".")[2]

    @property
    def sentence(self) -> str:
        return self.name.replace("_", " ")

    @property
    def oracle(self) -> str:
        """The column that the other columns are compared with."""
        return ORACLE if ORACLE in self.columns else self.columns[0]

    def deviation(self, column: str, flag: str) -> Deviation | None:
        for each in self.deviations:
            if column in each.columns and flag in each.flags:
                return each
        return None


_SCENARIOS: dict[str, Scenario] = {}


def scenario(
    feature: str,
    app: Factory | None = None,
    *deviations: Deviation,
    columns: tuple[str, ...] = COLUMNS,
    flags: str = FLAGS,
) -> Callable[[Callable[[Client], Any]], Callable[[Client], Any]]:
    """Register a scenario; without `app` it deploys its applications itself."""

    def register(observe: Callable[[Client], Any]) -> Callable[[Client], Any]:
        name = observe.__name__
        assert name not in _SCENARIOS, f"two scenarios are called {name}"
        assert feature in FEATURES
        _SCENARIOS[name] = Scenario(name, feature, app, observe, deviations, columns, flags)
        return observe

    return register


def scenarios() -> list[Scenario]:
    """Return all scenarios, module by module."""
    folder = Path(__file__).parent / "scenarios"
    paths = sorted(folder.glob("[a-z]*.py"), key=lambda each: (each.stem != "examples", each.stem))
    for path in paths:  # the examples first, which import others: always in the same order
        import_module(f"tests.engines.scenarios.{path.stem}")
    return list(_SCENARIOS.values())
