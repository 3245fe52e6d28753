"""The states of one reply, and the events that change them."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class ReplyState(IntEnum):
    """The state of a reply. It belongs to the HTTP loop.

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
    """The reply ended with an error of its own: the client is answered, or cut off."""
    GONE = 5
    """The client has left: no answer is sent."""
    LEFT = 6
    """The server's task has left it. A slot that comes now is given back."""


# Members of an enum are slow to look up in its class.
READING: Final = ReplyState.READING
CALLED: Final = ReplyState.CALLED
STARTED: Final = ReplyState.STARTED
COMPLETE: Final = ReplyState.COMPLETE
CUT: Final = ReplyState.CUT
GONE: Final = ReplyState.GONE
LEFT: Final = ReplyState.LEFT
