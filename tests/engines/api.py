"""The API that the scenarios of this process are written against.

native    `from ray import serve`     Ray Serve itself: the oracle
ray       `import ingress as serve`   on the Ray engine
local     `import ingress as serve`   in this process
process   the same, each deployment with isolation="process"
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

COLUMN = "INGRESS_SCENARIO_COLUMN"


class Isolated:
    """The API of `ingress`, whose `run` puts each deployment into child processes."""

    def __init__(self) -> None:
        self._serve = import_module("ingress")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._serve, name)

    def run(self, target: Any, *args: Any, **options: Any) -> Any:
        build = import_module("ingress.app.declaration.build")
        try:
            names = [each.name for each in build.build(target, "").deployments]
            target = build.with_options(target, {name: {"isolation": "process"} for name in names})
        except Exception:
            pass  # `run` raises its own error
        return self._serve.run(target, *args, **options)


if TYPE_CHECKING:
    import ingress as serve
elif os.environ.get(COLUMN) == "process":
    serve = Isolated()
else:
    serve = import_module("ray.serve" if os.environ.get(COLUMN) == "native" else "ingress")

__all__ = ["COLUMN", "serve"]
