"""The states of one exchange, and the events that change them."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class ExchangeState(IntEnum):
    """The state of an exchange. It belongs to the HTTP loop.

        event                          from                      to
        the router gets the call       READING                   CALLED
        the response begins            CALLED                    STARTED
        its last message is sent       STARTED                   COMPLETE
        deadline, stalled body         READING, CALLED, STARTED  CUT       the task is cancelled
        the client leaves              READING, CALLED, STARTED  GONE      the call is cancelled
        sending to the client fails    any                       GONE      the call is cancelled
        `respond` ends                 any                       LEFT

    All other events leave the state as it is. The end of the call and the stop of the application
    may come in any state: `respond` leaves once it has sent all that came before them.
    """

    READING = 0
    """The body is read ahead. The call waits for no slot yet."""
    CALLED = 1
    """The call waits in the router, or runs. Nothing is sent."""
    STARTED = 2
    """The client has the start of the response, or the WebSocket is accepted or refused."""
    COMPLETE = 3
    """The server has the whole response. A background task may run on."""
    CUT = 4
    """The exchange ended with an error of its own: the client is answered, or cut off."""
    GONE = 5
    """The client has left: no answer is sent."""
    LEFT = 6
    """The server's task has left the exchange. A slot that comes now is given back."""


# Members of an enum are slow to look up in its class.
READING: Final = ExchangeState.READING
CALLED: Final = ExchangeState.CALLED
STARTED: Final = ExchangeState.STARTED
COMPLETE: Final = ExchangeState.COMPLETE
CUT: Final = ExchangeState.CUT
GONE: Final = ExchangeState.GONE
LEFT: Final = ExchangeState.LEFT
