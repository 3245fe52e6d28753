"""`ingress.logs`: a record names its request and replica."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest

import ingress as serve
from ingress.logs import RequestFilter
from tests.fakes import bind

PATIENCE_S = 60.0
FIELDS = (
    "request_id", "route", "application", "deployment", "replica", "multiplexed_model_id",
)  # fmt: skip


class Remembering(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in FIELDS}


@serve.deployment
class Talker:
    async def on_loop(self, logger: str) -> None:
        logging.getLogger(logger).warning("said")

    def in_thread(self, logger: str) -> None:
        logging.getLogger(logger).warning("said")


@pytest.mark.parametrize("method", ["on_loop", "in_thread"])
@pytest.mark.parametrize("logger", ["ingress", "users.own"])
def test_a_record_from_a_request_has_its_identity(
    method: str, logger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_SERVE_RUN_SYNC_IN_THREADPOOL", "1")
    handler = Remembering()
    if logger != "ingress":
        handler.addFilter(RequestFilter())  # a logger's filter sees the records of that logger only
    logging.getLogger(logger).addHandler(handler)
    try:
        handle = serve.run(bind(Talker), name="app", route_prefix=None)
        handle = handle.options(multiplexed_model_id="m")
        response = getattr(handle, method).remote(logger)
        response.result(timeout_s=PATIENCE_S)
    finally:
        serve.shutdown()
        logging.getLogger(logger).removeHandler(handler)

    (record,) = (each for each in handler.records if each.getMessage() == "said")
    assert fields(record) == {
        "request_id": response.request_id,
        "route": "",
        "application": "app",
        "deployment": "Talker",
        "replica": "0",
        "multiplexed_model_id": "m",
    }


def test_outside_of_a_request_the_fields_are_empty_and_the_record_passes() -> None:
    handler = Remembering()
    logger = logging.getLogger("ingress")
    logger.addHandler(handler)
    try:
        logger.warning("said")
    finally:
        logger.removeHandler(handler)

    assert fields(handler.records[0]) == dict.fromkeys(FIELDS, "")


def test_importing_the_package_gives_its_logger_the_fields() -> None:
    script = (
        "import logging, ingress\n"
        "logging.basicConfig(format='%(name)s|%(request_id)s|%(deployment)s|%(message)s')\n"
        "logging.getLogger('ingress').warning('said')\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stderr == "ingress|||said\n"
