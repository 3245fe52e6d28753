"""Ctrl-C while the command line starts: one line, and exit code 130.

    the package is imported    ends the process at once: there is nothing to clean up
    a command begins           `KeyboardInterrupt`, which the command reports in one line
    an application starts      `signals.StopSignals`; in a script, too

The package imports this module before all others: on a busy machine its imports take most of a
start. It changes no handler in a process that does not run the command line.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType

INTERRUPTED = 130  # 128 + SIGINT, as shells count
_LINE = "stopped by Ctrl-C"
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")  # options of Python

_was_pressed = False


def _runs_command_line() -> bool:
    """Return whether this process is `ingress ...` or `python -m ingress ...`.

    Not a child that `multiprocessing` starts there: its `sys.argv` is that of its parent.
    """
    arguments = iter(sys.orig_argv[1:])
    for each in arguments:
        if each in _WITH_VALUE:
            next(arguments, None)
        elif each == "-m":
            return next(arguments, "") == __name__.partition(".")[0]
        elif not each.startswith("-") or each == "-c":
            return os.path.basename(each).removesuffix(".exe") == __name__.partition(".")[0]
    return False


def say_stopped() -> None:
    """Write the line that a start, or another command, was stopped, in one piece."""
    is_start = sys.argv[1:2] == ["run"] or not _runs_command_line()
    os.write(2, f"{_LINE}{', before it served' if is_start else ''}\n".encode())


def without_traceback(error: KeyboardInterrupt) -> KeyboardInterrupt:
    """Have Python write the line in the place of a traceback, if no code handles the error."""
    others = sys.excepthook

    def report(
        kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        if value is error:
            say_stopped()
        else:
            others(kind, value, traceback)

    sys.excepthook = report
    return error


def was_pressed() -> bool:
    """Return whether Ctrl-C came since the command began, even if user code has swallowed it."""
    return _was_pressed


def begin_command() -> None:
    """Have Ctrl-C raise `KeyboardInterrupt` from now on, if it ends the process until now."""
    if signal.getsignal(signal.SIGINT) is _end:
        sys.unraisablehook = _report_unraisable
        signal.signal(signal.SIGINT, _interrupt)


def _begin() -> None:
    if (
        _runs_command_line()
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: FrameType | None) -> None:
    # Not an exception: a class in the middle of its making would turn it into another one.
    say_stopped()
    os._exit(INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _was_pressed
    _was_pressed = True
    raise KeyboardInterrupt


def _report_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Report the error of a `__del__` or a callback, but not Ctrl-C: it is reported later."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


_begin()
