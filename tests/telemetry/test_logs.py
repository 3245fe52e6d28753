"""`ingress.logs`: a record names its request and replica."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import os
import pickle
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

import ingress as serve
from ingress.telemetry.logs import sinks
from ingress.telemetry.logs.formats import AccessText, JSONFormatter, TextFormatter
from tests.fakes import bind
from tests.servers import records_of, served, wait_until

PATIENCE_S = 60.0
Records = list[logging.LogRecord]
FIELDS = (
    "request_id", "route", "application", "deployment", "replica", "multiplexed_model_id",
)  # fmt: skip


def fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in FIELDS}


@serve.deployment
class Talker:
    async def on_loop(self, logger: str) -> None:
        logging.getLogger(logger).warning("said")

    def in_thread(self, logger: str) -> None:
        logging.getLogger(logger).warning("said")


@pytest.fixture
def users() -> Iterator[Records]:
    """The records of the logger `users.own`, as a handler without a filter gets them."""
    with records_of("users.own") as records:
        yield records


@pytest.mark.parametrize("method", ["on_loop", "in_thread"])
@pytest.mark.parametrize("logger", ["ingress", "users.own"])
def test_a_record_from_a_request_has_its_identity(
    method: str, logger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_SERVE_RUN_SYNC_IN_THREADPOOL", "1")
    with records_of(logger) as records:
        handle = serve.run(bind(Talker), name="app", route_prefix=None)
        handle = handle.options(multiplexed_model_id="m")
        response = getattr(handle, method).remote(logger)
        response.result(timeout_s=PATIENCE_S)
        serve.shutdown()

    (record,) = (each for each in records if each.getMessage() == "said")
    assert fields(record) == {
        "request_id": response.request_id,
        "route": "",
        "application": "app",
        "deployment": "Talker",
        "replica": "0",
        "multiplexed_model_id": "m",
    }


def test_outside_of_a_request_the_fields_are_empty_and_the_record_passes() -> None:
    with records_of("ingress") as records:
        logging.getLogger("ingress").warning("said")

    assert fields(records[0]) == dict.fromkeys(FIELDS, "")


@serve.deployment
class Writer:
    """It logs by the user's own logger, in every way that code runs."""

    def __init__(self) -> None:
        logging.getLogger("users.own").warning("constructing")

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=20)
    async def together(self, numbers: list[int]) -> list[int]:
        logging.getLogger("users.own").warning("batch")
        return numbers

    async def in_batch(self, number: int) -> int:
        result: int = await self.together(number)
        return result

    async def with_own_id(self) -> None:
        extra = {"request_id": "mine", "deployment": "mine", "other": 1}
        logging.getLogger("users.own").warning("own", extra=extra)

    async def in_thread(self) -> None:
        await asyncio.to_thread(logging.getLogger("users.own").warning, "thread")


def test_the_record_of_a_constructor_has_its_replica(users: Records) -> None:
    serve.run(bind(Writer), name="app", route_prefix=None)
    serve.shutdown()

    [record] = users
    assert fields(record) == {
        **dict.fromkeys(FIELDS, ""),
        "application": "app",
        "deployment": "Writer",
        "replica": "0",
    }


def test_a_value_of_the_program_for_a_field_is_kept_by_each_logger(
    users: Records,
) -> None:
    serve.run(bind(Writer), route_prefix=None).with_own_id.remote().result(timeout_s=PATIENCE_S)
    serve.shutdown()

    [record] = (each for each in users if each.getMessage() == "own")
    found = fields(record)
    assert (found["request_id"], found["deployment"], found["replica"]) == ("mine", "mine", "0")
    text = logging.Formatter("{request_id} {other} {replica}", style="{").format(record)
    assert text == logging.Formatter("%(request_id)s %(other)s %(replica)s").format(record)
    assert text == "mine 1 0"
    assert fields(pickle.loads(pickle.dumps(copy.copy(record)))) == found
    assert type(pickle.loads(pickle.dumps(record)).__dict__) is dict


def test_a_record_factory_of_the_program_is_called_and_comes_back(
    users: Records,
) -> None:
    before = logging.getLogRecordFactory()

    def mine(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = before(*args, **kwargs)
        record.__dict__["mine"] = True
        return record

    logging.setLogRecordFactory(mine)
    try:
        serve.run(bind(Writer), route_prefix=None).in_thread.remote().result(timeout_s=PATIENCE_S)
        serve.shutdown()
        assert logging.getLogRecordFactory() is mine
    finally:
        logging.setLogRecordFactory(before)

    [record] = (each for each in users if each.getMessage() == "thread")
    assert record.__dict__["mine"]
    assert fields(record)["deployment"] == "Writer"


def test_a_record_factory_that_the_program_sets_later_stays(users: Records) -> None:
    before = logging.getLogRecordFactory()
    handle = serve.run(bind(Writer), route_prefix=None)
    ours = logging.getLogRecordFactory()

    def mine(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = ours(*args, **kwargs)
        record.__dict__["mine"] = True
        return record

    logging.setLogRecordFactory(mine)
    try:
        handle.in_thread.remote().result(timeout_s=PATIENCE_S)
        serve.shutdown()
        assert logging.getLogRecordFactory() is mine
        serve.run(bind(Writer), route_prefix=None)  # around the program's, which has one already
        serve.shutdown()
        assert logging.getLogRecordFactory() is mine
    finally:
        logging.setLogRecordFactory(before)

    assert {fields(each)["deployment"] for each in users} == {"Writer"}
    assert [each.__dict__["mine"] for each in users if each.getMessage() == "thread"]


def test_the_thread_of_a_sink_ends_when_it_is_idle_and_loses_no_line(
    switch_interval: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "IDLE_S", 1e-5)  # it ends again and again, as others put lines
    written: list[str] = []
    sink = sinks.Sink("of-the-test", written.extend)
    deadline = time.monotonic() + PATIENCE_S

    for number in range(200):
        sink.put(str(number))
        while len(written) <= number:  # at once: the thread is about to end
            assert time.monotonic() < deadline, f"line {number} waits for the next one"
    wait_until(lambda: "of-the-test" not in [each.name for each in threading.enumerate()])
    sink.put("after")
    assert sink.flush(PATIENCE_S)
    assert written == [*map(str, range(200)), "after"]


def test_lines_wait_for_a_slow_reader_up_to_the_limit_after_each_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sinks, "QUEUE_CHARACTERS", 10_000)
    monkeypatch.setattr(sinks, "MOST_LINES", 20)
    monkeypatch.setattr(sinks.logger, "disabled", True)
    written: list[str] = []
    reading = threading.Semaphore(0)

    def write(lines: list[str]) -> None:
        reading.acquire()
        written.extend(lines)

    sink = sinks.Sink("of-the-test", write)
    count = 0
    for _ in range(4):
        dropped, before = sink.dropped, len(written)
        while sink.dropped == dropped:
            sink.put("x" * 100)
            count += 1
        # The lines that were just written may not be counted yet.
        assert 101 - 20 <= count - sink.dropped - before <= 101
        reading.release()
        wait_until(lambda: len(written) > before)  # noqa: B023
    for _ in range(count):
        reading.release()
    assert sink.flush(PATIENCE_S)
    assert len(written) == count - sink.dropped


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux")
def test_a_line_that_cannot_be_written_loses_no_line_of_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks.logger, "disabled", True)
    (tmp_path / "file").touch()
    dropped = sinks.FILES.dropped
    for path, line in (
        ("one.log", "half of a pair: \ud800"),
        ("file/of-no-folder.log", "lost"),
        ("two.log", "mine é"),
    ):
        sinks.FILES.put((str(tmp_path / path), line), 10)

    assert sinks.FILES.flush(PATIENCE_S)
    wait_until(lambda: not open_files_in(tmp_path))
    assert (tmp_path / "one.log").read_text() == "half of a pair: \\ud800\n"
    assert (tmp_path / "two.log").read_text("utf-8") == "mine é\n"
    assert sinks.FILES.dropped == dropped + 1


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux")
def test_the_files_of_many_replicas_do_not_stay_open(tmp_path: Path) -> None:
    for turn in ("first", "second"):
        for number in range(200):
            sinks.FILES.put((str(tmp_path / f"replica_{number}.log"), turn), 10)
            assert len(open_files_in(tmp_path)) <= 65  # one is opened before another is closed
        assert sinks.FILES.flush(PATIENCE_S)

    for number in range(200):
        assert (tmp_path / f"replica_{number}.log").read_text() == "first\nsecond\n"
    wait_until(lambda: not open_files_in(tmp_path))


def open_files_in(folder: Path) -> list[str]:
    found = []
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it is closed meanwhile
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return [each for each in found if each.startswith(f"{folder}/")]


def record_of(**fields: Any) -> logging.LogRecord:
    record = logging.LogRecord("ingress", logging.INFO, "f.py", 1, "said %s", ("so",), None)
    record.__dict__.update(fields)
    return record


def test_each_attribute_of_a_record_is_there_if_it_is_asked_for() -> None:
    names = ("asctime", "message", "levelname", "module")
    fields = json.loads(JSONFormatter(names).format(record_of()))
    assert fields["message"] == "said so"
    assert re.match(r"\d{4}-\d\d-\d\d ", fields["asctime"])
    assert (fields["levelname"], fields["module"]) == ("INFO", "f")
    assert re.fullmatch(
        r"INFO:     said so asctime=\d{4}-\S+ \S+ message=said so levelname=INFO module=f",
        TextFormatter(names).format(record_of()),
    )


def test_no_text_of_a_client_adds_a_field_to_an_access_line() -> None:
    line = AccessText().format(
        record_of(
            client="\x9b2J 6.6.6.6 GET /admin 200:0",
            method="GET",
            path="/nowhere 200 1.0ms",
            status=404,
            request_id="id",
        )
    )
    assert line == (
        r"INFO:     \x9b2J\x206.6.6.6\x20GET\x20/admin\x20200:0 GET /nowhere\x20200\x201.0ms 404 "
        "0.0ms queue 0.0ms id"
    )


def test_uvicorns_access_log_may_be_switched_on_while_a_server_runs() -> None:
    logger = logging.getLogger("uvicorn.access")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with records_of(logger.name) as records:
            url = f"http://127.0.0.1:{served(bind(Talker))}/-/healthz"
            httpx.get(f"{url}?off", timeout=PATIENCE_S)
            logger.setLevel(logging.INFO)
            httpx.get(f"{url}?on", timeout=PATIENCE_S)
            wait_until(lambda: bool(records))
    finally:
        serve.shutdown()
        logger.setLevel(before)

    (line,) = (each.getMessage() for each in records)
    assert line.endswith('"GET /-/healthz?on HTTP/1.1" 200')
