"""The API that the scenarios of this process are written against.

native    `from ray import serve`     Ray Serve itself: the oracle
ray       `import ingress as serve`   on the Ray engine
local     `import ingress as serve`   in this process
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

COLUMN = "INGRESS_SCENARIO_COLUMN"

if TYPE_CHECKING:
    import ingress as serve
else:
    serve = import_module("ray.serve" if os.environ.get(COLUMN) == "native" else "ingress")

__all__ = ["COLUMN", "serve"]
