"""`ingress.core.base.settings`: the environment, read when an engine starts."""

from __future__ import annotations

import os
import re

import pytest

from ingress.core.base.settings import (
    BODY_BUFFER_BYTES,
    BODY_IDLE_TIMEOUT_S,
    ENGINE,
    HEADER_TIMEOUT_S,
    LIMIT_CONNECTIONS,
    MAX_BODY_SIZE,
    MAX_HEADER_BYTES,
    MAX_RETRIES,
    MIN_BODY_RATE,
    PIN_CPUS,
    REQUEST_TIMEOUT_S,
    ROUTER_IN_SEPARATE_LOOP,
    STALL_THRESHOLD_MS,
    START_METHOD,
    SYNC_IN_THREADPOOL,
    THROUGHPUT_OPTIMIZED,
    TRACE_URL,
    USER_CODE_IN_SEPARATE_THREAD,
    HTTPLimits,
    Settings,
    expanded,
)

FLAGS = {
    SYNC_IN_THREADPOOL: ("run_sync_in_threadpool", False),
    USER_CODE_IN_SEPARATE_THREAD: ("run_user_code_in_separate_thread", True),
    ROUTER_IN_SEPARATE_LOOP: ("run_router_in_separate_loop", True),
    PIN_CPUS: ("pin_cpus", False),
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_its_default_unless_set_to_0_or_1(name: str) -> None:
    field, default = FLAGS[name]
    values = [Settings.from_environment(env) for env in ({}, {name: "0"}, {name: "1"})]

    assert [getattr(settings, field) for settings in values] == [default, False, True]


def test_rays_throughput_mode_is_the_default_of_the_two_separate_flags() -> None:
    mode = Settings.from_environment({THROUGHPUT_OPTIMIZED: "1"})
    given = {THROUGHPUT_OPTIMIZED: "1", USER_CODE_IN_SEPARATE_THREAD: "1"}
    set_ = Settings.from_environment(given)

    assert not mode.run_user_code_in_separate_thread
    assert not mode.run_router_in_separate_loop
    assert set_.run_user_code_in_separate_thread
    assert not set_.run_router_in_separate_loop


@pytest.mark.parametrize(
    ("value", "seconds"), [("0", None), ("", None), ("0.0", None), ("2.5", 2.5), ("30", 30.0)]
)
def test_a_request_timeout_is_a_number_of_seconds_and_0_is_none(
    value: str, seconds: float | None
) -> None:
    assert Settings.from_environment({REQUEST_TIMEOUT_S: value}).request_timeout_s == seconds


@pytest.mark.parametrize(
    ("value", "seconds"), [(None, 0.1), ("", 0.1), ("0", None), ("250", 0.25), ("0.5", 0.0005)]
)
def test_a_stall_is_100_ms_unless_set_and_0_is_none(
    value: str | None, seconds: float | None
) -> None:
    env = {} if value is None else {STALL_THRESHOLD_MS: value}

    assert Settings.from_environment(env).stall_threshold_s == seconds


def test_the_number_of_retries_is_10_unless_set() -> None:
    values = [{}, {MAX_RETRIES: ""}, {MAX_RETRIES: "0"}, {MAX_RETRIES: "3"}]

    assert [Settings.from_environment(each).max_retries for each in values] == [10, 10, 0, 3]


def test_limits_of_http_are_numbers_and_0_is_no_limit() -> None:
    given = {LIMIT_CONNECTIONS: "0", MAX_HEADER_BYTES: "100", HEADER_TIMEOUT_S: "0"}
    given[MIN_BODY_RATE] = "0"

    assert Settings.from_environment(given).http_limits == HTTPLimits(
        limit_connections=None,
        max_header_bytes=100,
        header_timeout_s=None,
        min_body_rate=None,
    )


OTHERS: list[tuple[str, list[str], str]] = [
    *((name, ["yes", "true", "", "2", " 1"], "0 or 1") for name in FLAGS),
    (REQUEST_TIMEOUT_S, ["-1", "nan", "inf", "5s", "1e309"], "a number of seconds"),
    (STALL_THRESHOLD_MS, ["-1", "nan", "inf", "5ms"], "a number of milliseconds"),
    (MAX_RETRIES, ["-1", "1.5", "ten", "²", " 1"], "an integer ≥ 0"),
    (LIMIT_CONNECTIONS, ["-1"], "an integer ≥ 0"),
    (MAX_HEADER_BYTES, ["0"], "an integer ≥ 1"),
    (HEADER_TIMEOUT_S, ["soon"], "a number of seconds > 0, or 0 for no limit"),
    (BODY_BUFFER_BYTES, ["0"], "an integer ≥ 1"),
    (BODY_IDLE_TIMEOUT_S, ["-1"], "a number of seconds > 0, or 0 for no limit"),
    (MIN_BODY_RATE, ["fast"], "an integer ≥ 0"),
    (MAX_BODY_SIZE, ["1 GB"], "an integer ≥ 0"),
    (ENGINE, ["raay", "Local"], "local or ray(?=.*; set it to one of these, or)"),
    (START_METHOD, ["fork"], "spawn or forkserver(?=.*; set it to one of these)"),
]


@pytest.mark.parametrize(("name", "values", "expected"), OTHERS, ids=[each[0] for each in OTHERS])
def test_another_value_is_refused_by_name_with_what_it_may_be(
    name: str, values: list[str], expected: str
) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"{name} must be {expected}.*got {value!r}"):
            Settings.from_environment({name: value})


@pytest.mark.parametrize(
    "value",
    [
        "traces.example/{trace_id}",
        "javascript:alert('{trace_id}')",
        "http://{trace_id}/",
        "https://traces.example/trace",
        "https://traces.example/{trace_id}/{span_id}",
    ],
)
def test_the_url_of_a_trace_is_one_of_http_with_the_place_of_the_id(value: str) -> None:
    good = "https://traces.example/trace/{trace_id}?from=ingress"
    assert Settings.from_environment({TRACE_URL: good}).trace_url == good
    with pytest.raises(ValueError, match=f"{TRACE_URL} must be the http.*{re.escape(value)}"):
        Settings.from_environment({TRACE_URL: value})


def test_settings_made_without_an_environment_are_its_defaults() -> None:
    assert Settings() == Settings.from_environment({})


def test_the_environment_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for value in "10":
        monkeypatch.setenv(SYNC_IN_THREADPOOL, value)
        seen.append(Settings.from_environment().run_sync_in_threadpool)

    assert seen == [True, False]


def test_the_host_is_taken_as_it_is_and_what_is_empty_as_unset() -> None:
    given = {"RAY_SERVE_DEFAULT_HTTP_HOST": "::1", ENGINE: "local"}

    assert Settings.from_environment(given) == Settings(http_host="::1")
    assert Settings.from_environment(dict.fromkeys(given, "")) == Settings()


def test_cores_are_refused_where_a_process_cannot_choose_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)

    assert not Settings.from_environment({PIN_CPUS: "0"}).pin_cpus
    with pytest.raises(ValueError, match="INGRESS_PIN_CPUS=1 needs a system on which a process"):
        Settings.from_environment({PIN_CPUS: "1"})


# As a task of Ray 2.60.0 has found each.
EXPANDED = {
    "braces": ("x:${BASE}", "x:base"),
    "bare": ("x:$BASE/y", "x:base/y"),
    "longer": ("$BASE_", "$BASE_"),
    "lower": ("${lower}|$lower", "low|low"),
    "unset": ("[${UNSET}|$UNSET|${unset}]", "[|$UNSET|${unset}]"),
    "itself": ("/x:${ITSELF}", "/x:"),
    "second": ("[${FIRST}]", "[[]]"),  # sorted, not in the order that is written
    "first": ("[${SECOND}]", "[]"),
    "replaced": ("$MINE", "mine"),
    "dollars": ("$$|$$BASE|$", "$$|$base|$"),
    "backslash": (r"\$BASE \${BASE}", r"\base \base"),
    "once": ("[${REFERENCE}|$LITERAL]", "[|$BASE]"),
    "nested": ("[${UN${BASE}}]", "[${UN}]"),
    "shell": ("${BASE:-d}|${}|${BASE|${{BASE}|$1|${1}", "${BASE:-d}|${}|${BASE|${{BASE}|$1|"),
    "others": ("%BASE%|~|$é|${é}", "%BASE%|~|$é|${é}"),
}


def test_variables_are_expanded_as_on_ray() -> None:
    there = {"BASE": "base", "lower": "low", "REFERENCE": "${BASE}", "LITERAL": "$BASE", "MINE": ""}
    given = {name.upper(): value for name, (value, _) in EXPANDED.items()}
    found = expanded({**given, "MINE": "mine"}, there)

    assert found == {
        **{name.upper(): value for name, (_, value) in EXPANDED.items()},
        "MINE": "mine",
    }
    assert there["MINE"] == ""


def test_the_flags_fixture_is_what_the_environment_says(flags: Settings) -> None:
    assert flags == Settings.from_environment()
