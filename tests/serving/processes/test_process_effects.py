"""`docs/effects.md`: what the product does to its process, switched off."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from ingress.core.base.settings import (
    HANDLE_SIGNALS,
    OMP_NUM_THREADS,
    RAISE_FILE_LIMIT,
    SET_NATIVE_THREADS,
)
from tests.programs import INGRESS, ROOT, environment, process, write_module
from tests.servers import get

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="limits and signals of Unix")

APP = """
import os, resource, signal
import ingress as serve

@serve.deployment
class Effects:
    def __call__(self, request):
        handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
        return {
            "soft": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "handlers": [str(getattr(each, "name", each)) for each in handlers],
            "omp": os.environ.get("OMP_NUM_THREADS"),
        }

effects = Effects.bind()
"""


@pytest.mark.thorough
def test_each_effect_of_a_server_can_be_switched_off(tmp_path: Path) -> None:
    write_module(tmp_path, "app", APP)
    environ = environment(tmp_path)
    environ |= dict.fromkeys((RAISE_FILE_LIMIT, HANDLE_SIGNALS, SET_NATIVE_THREADS), "0")
    environ.pop(OMP_NUM_THREADS, None)
    limited = ["sh", "-c", 'ulimit -Sn 512; exec "$@"', "sh"]
    command = [*limited, *INGRESS, "run", "app:effects", "--port", "0"]
    with process(command, tmp_path, environ) as server:
        server.wait_for("is ready")
        seen = get(server.port, "/").body
        server.process.send_signal(signal.SIGTERM)

        assert server.process.wait(10) == -signal.SIGTERM
    assert seen == b'{"soft":512,"handlers":["SIG_DFL","SIG_DFL"],"omp":null}'
    assert "OMP_NUM_THREADS is not set" in server.output


def test_every_switch_is_on_the_page() -> None:
    page = (ROOT / "docs" / "effects.md").read_text()
    settings = (ROOT / "ingress" / "core" / "base" / "settings.py").read_text()
    found = {*re.findall(r"INGRESS_(?:FREEZE|RAISE|ADAPT|HANDLE|SET)_[A-Z_]+", settings)}

    assert len(found) == 5
    assert [each for each in found if f"`{each}=0`" not in page] == []
