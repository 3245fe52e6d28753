"""The handlers of signals of a process that serves."""

from __future__ import annotations

import signal

from ingress.core.base.signals import StopSignals


def test_handlers_and_pythons_functions_are_back_once_a_server_has_ended() -> None:
    def registered() -> tuple[object, ...]:
        return signal.signal, signal.getsignal, signal.getsignal(signal.SIGTERM)

    before = registered()
    with StopSignals():
        assert signal.signal is not before[0]
        with StopSignals():
            pass
        assert signal.getsignal(signal.SIGTERM) is not before[2]
    assert registered() == before
