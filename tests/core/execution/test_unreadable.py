"""`ingress.core.execution.errors`: errors of user code are safe to inspect."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import pytest

from ingress.core.execution.errors import readable
from ingress.exceptions import UnreadableError
from tests.containment_app import HOSTILE, hostile

UNREADABLE = ["getattribute", "class", "cause", "context", "traceback", "notes", "equality"]


def raised(name: str) -> BaseException:
    try:
        raise HOSTILE[name]()
    except BaseException as error:
        return error


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unreadable_error_is_replaced_by_one_with_its_traceback(name: str) -> None:
    standing = readable(raised(name))

    assert type(standing) is UnreadableError
    assert "Hostile, whose attributes cannot be read" in str(standing)
    assert "in raised" in "".join(traceback.format_exception(standing))
    assert str(pickle.loads(pickle.dumps(standing))) == str(standing)


def test_the_class_of_an_unreadable_error_may_have_no_module() -> None:
    class Nowhere(Exception):
        del __module__  # noqa: F821  # Python has put it there

        def __bool__(self) -> bool:
            raise ValueError

    assert "Nowhere, whose attributes cannot be read" in str(readable(Nowhere()))


def test_a_readable_error_is_not_replaced() -> None:
    class Odd(Exception):
        __suppress_context__ = True

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    for error in (ValueError(), Odd(), KeyboardInterrupt(), ExceptionGroup("g", [Odd()])):
        assert readable(error) is error


@pytest.mark.parametrize("name", HOSTILE)
def test_all_that_led_to_an_error_can_be_looked_at(name: str) -> None:
    last = ValueError("last")
    try:
        raise KeyError("middle") from raised(name)
    except KeyError as middle:
        last.__context__ = middle

    assert readable(last) is last
    assert "".join(traceback.format_exception(last)).endswith("ValueError: last\n")
    each: BaseException | None = last
    for _ in range(3):
        assert each is not None
        assert isinstance(each, Exception | UnreadableError)
        each = each.__cause__ or each.__context__


def test_a_group_that_led_to_its_own_member_has_an_end() -> None:
    member = ValueError("member")
    group = ExceptionGroup("group", [member])
    member.__context__ = group

    assert readable(member) is member
    assert readable(group) is group


def test_a_group_is_stood_for_with_a_member_at_any_depth() -> None:
    inner = ExceptionGroup("inner", [ValueError("fine"), hostile("__class__")()])

    assert type(readable(ExceptionGroup("outer", [inner]))) is UnreadableError


def test_a_suppressed_context_stays_suppressed() -> None:
    error = ValueError("shown")
    error.__cause__ = raised("cause")
    error.__suppress_context__ = False

    assert readable(error).__suppress_context__ is False
    assert type(error.__cause__) is UnreadableError
