"""The states of one reply, the events that change them, and what each change asks for.

    TABLE[state][event]   the next state, and the actions in their order

`Reply.on` runs the table `HTTP`, or `WEBSOCKET` for a WebSocket. Each row says of each event what
follows, that nothing does, or that it cannot come: then it raises `ImpossibleEventError`. Nothing
here waits, locks or sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class ReplyState(IntEnum):
    """A state of a reply: what its client has, and whether the call runs.

    READING    the request is read. The call waits for no slot yet
    CALLED     the call waits in the router, or runs. Nothing is sent
    STARTED    the response has begun
    OPEN       the WebSocket is accepted
    COMPLETE   the server has the whole response. A background task may run on
    FAILED     the call has ended, without a response
    ENDING     the call has ended. The rest of the response is being sent
    CLOSING    the call has ended. The last messages of the WebSocket are being sent
    DONE       the server has the whole response, and the call has ended
    TOLD       the client has left. User code listens for that, and ends by itself
    ABANDONED  the server has cancelled its task, or failed. The call cleans up
    CUT        the reply has ended with an error of its own: the client is answered, or cut off
    GONE       the client has left: no answer is sent. The call is being cancelled
    LOST       the client has left, and the call has ended
    LEFT       the server's task has left the reply. A slot that comes now is given back
    """

    READING = 0
    CALLED = 1
    STARTED = 2
    OPEN = 3
    COMPLETE = 4
    FAILED = 5
    ENDING = 6
    CLOSING = 7
    DONE = 8
    TOLD = 9
    ABANDONED = 10
    CUT = 11
    GONE = 12
    LOST = 13
    LEFT = 14


class ReplyEvent(IntEnum):
    """Something that happens to a reply.

    READ    the request is read, as far as it is before the call
    SLOT    a replica on this loop has a slot for the call
    ACCEPT  the acceptance of a WebSocket is given to the server
    BEGIN   the start of a response is given to the server, also of a WebSocket's refusal
    FINISH  the last message is given to the server
    END     the call has ended, and all that it has sent is here
    LATE    the deadline has passed, or the body stalls or is too large
    GO      the client has left
    PART    the client has left, and user code listens for that
    HEARD   user code has heard that the client has left, from its `send`
    UNSENT  the server has told its task that the client has left
    BREAK   the server cancels its task, or fails
    LEAVE   the server's task leaves the reply; before its end is known if it is cancelled twice
    """

    READ = 0
    SLOT = 1
    ACCEPT = 2
    BEGIN = 3
    FINISH = 4
    END = 5
    LATE = 6
    GO = 7
    PART = 8
    HEARD = 9
    UNSENT = 10
    BREAK = 11
    LEAVE = 12


class Action(IntEnum):
    """Something that a change of state asks for.

    ASK        ask the router for a slot
    RUN        run the call in the server's task, in the slot that came
    RELEASE    give back the slot that came
    CANCEL     cancel the call, with an error of the reply's own if there is one
    STOP       cancel the call as a stop of its application does: a background task, too
    TELL       tell user code by `receive` that its client is gone, and cancel it if it is deaf
    WAKE       wake the server's task
    INTERRUPT  cancel what the server's task waits for
    REFUSE     send nothing: the sender gets an error
    CLOSE      close the WebSocket, and raise the error of the call
    RAISE      raise the error of the call
    OWN        raise it, else the reply's own
    REPORT     raise it, unless ingress itself has ended the call
    EXCUSE     raise it, unless it follows from the client's disconnect
    """

    ASK = 0
    RUN = 1
    RELEASE = 2
    CANCEL = 3
    STOP = 4
    TELL = 5
    WAKE = 6
    INTERRUPT = 7
    REFUSE = 8
    CLOSE = 9
    RAISE = 10
    OWN = 11
    REPORT = 12
    EXCUSE = 13


class ImpossibleEventError(RuntimeError):
    """An event has come that cannot come in the state of the reply: a defect of ingress."""


# Members of an enum are slow to look up in its class.
(
    READING, CALLED, STARTED, OPEN, COMPLETE, FAILED, ENDING, CLOSING, DONE, TOLD, ABANDONED,
    CUT, GONE, LOST, LEFT,
) = ReplyState  # fmt: skip
READ, SLOT, ACCEPT, BEGIN, FINISH, END, LATE, GO, PART, HEARD, UNSENT, BREAK, LEAVE = ReplyEvent
(
    ASK, RUN, RELEASE, CANCEL, STOP, TELL, WAKE, INTERRUPT, REFUSE, CLOSE, RAISE, OWN, REPORT,
    EXCUSE,
) = Action  # fmt: skip

Cell = tuple[ReplyState, tuple[Action, ...]]
Row = tuple[Cell | None, ...]
Table = tuple[Row, ...]
Change = tuple[ReplyState] | tuple[ReplyState, Action] | tuple[ReplyState, Action, Action]


def _row(
    state: ReplyState,
    changes: Mapping[ReplyEvent, Change],
    *,
    stays: tuple[ReplyEvent, ...] = (),
    never: tuple[ReplyEvent, ...] = (),
) -> Row:
    """Return the row of a state. Each event is in one of the three, once."""
    assert sorted((*changes, *stays, *never)) == list(ReplyEvent), f"the events of {state.name}"
    following: dict[ReplyEvent, Change] = {**dict.fromkeys(stays, (state,)), **changes}
    cells = (following.get(event) for event in ReplyEvent)
    return tuple(cell and (cell[0], cell[1:]) for cell in cells)


def _table(*rows: Row) -> Table:
    assert len(rows) == len(ReplyState), "a row for each state"
    return rows


_NO_ROW: Row = (None,) * len(ReplyEvent)

HTTP: Table = _table(
    _row(
        READING,
        {
            READ: (CALLED, ASK),
            END: (FAILED, INTERRUPT),  # by a stop
            LATE: (CUT, CANCEL, INTERRUPT),
            UNSENT: (GONE, CANCEL),
            BREAK: (ABANDONED, CANCEL),
            LEAVE: (LEFT, CANCEL),
        },
        never=(SLOT, ACCEPT, BEGIN, FINISH, GO, PART, HEARD),
    ),
    _row(
        CALLED,
        {
            SLOT: (CALLED, RUN),
            BEGIN: (STARTED,),
            END: (FAILED, WAKE),
            LATE: (CUT, CANCEL, INTERRUPT),
            GO: (GONE, CANCEL),
            PART: (TOLD, TELL),
            UNSENT: (GONE, CANCEL),
            BREAK: (ABANDONED, CANCEL),
            LEAVE: (LEFT, CANCEL),
        },
        stays=(FINISH,),  # the server refuses a body without a start
        never=(READ, ACCEPT, HEARD),
    ),
    _row(
        STARTED,
        {
            SLOT: (STARTED, RELEASE),
            FINISH: (COMPLETE,),
            END: (ENDING, WAKE),
            LATE: (CUT, CANCEL, INTERRUPT),
            GO: (GONE, CANCEL),
            PART: (TOLD, TELL),
            HEARD: (GONE,),
            UNSENT: (GONE, CANCEL),
            BREAK: (ABANDONED, CANCEL),
            LEAVE: (LEFT, CANCEL),
        },
        stays=(BEGIN,),  # the server refuses the second
        never=(READ, ACCEPT),
    ),
    _NO_ROW,  # OPEN
    _row(
        COMPLETE,
        {
            SLOT: (COMPLETE, RELEASE),
            END: (DONE, WAKE),
            HEARD: (GONE,),
            UNSENT: (GONE, CANCEL),
            BREAK: (ABANDONED, STOP),
            LEAVE: (LEFT, CANCEL),
        },
        stays=(BEGIN, FINISH, LATE, GO, PART),
        never=(READ, ACCEPT),
    ),
    _row(
        FAILED,
        {
            SLOT: (FAILED, RELEASE),
            BEGIN: (ENDING,),  # what it sent came after a stop
            UNSENT: (LOST,),
            BREAK: (ABANDONED,),
            LEAVE: (LEFT, RAISE),
        },
        stays=(FINISH, END, LATE, GO, PART),
        never=(READ, ACCEPT, HEARD),
    ),
    _row(
        ENDING,
        {
            SLOT: (ENDING, RELEASE),
            FINISH: (DONE,),
            LATE: (CUT, CANCEL, INTERRUPT),
            HEARD: (LOST,),
            UNSENT: (LOST,),
            BREAK: (ABANDONED,),
            LEAVE: (LEFT, RAISE),
        },
        stays=(BEGIN, END, GO, PART),
        never=(READ, ACCEPT),
    ),
    _NO_ROW,  # CLOSING
    _row(
        DONE,
        {
            SLOT: (DONE, RELEASE),
            HEARD: (LOST,),
            UNSENT: (LOST,),
            BREAK: (ABANDONED,),
            LEAVE: (LEFT, REPORT),
        },
        stays=(BEGIN, FINISH, END, LATE, GO, PART),
        never=(READ, ACCEPT),
    ),
    _row(
        TOLD,
        {
            SLOT: (TOLD, RELEASE),
            END: (LOST, WAKE),
            LATE: (GONE, CANCEL),
            UNSENT: (GONE, CANCEL),
            BREAK: (ABANDONED, CANCEL),
            LEAVE: (LEFT, CANCEL),
        },
        stays=(BEGIN, FINISH, GO, PART, HEARD),
        never=(READ, ACCEPT),
    ),
    _row(
        ABANDONED,
        {
            SLOT: (ABANDONED, RELEASE),
            BEGIN: (ABANDONED, REFUSE),
            FINISH: (ABANDONED, REFUSE),
            LEAVE: (LEFT,),
        },
        stays=(END, LATE, GO, PART, HEARD, UNSENT),
        never=(READ, ACCEPT, BREAK),
    ),
    _row(
        CUT,
        {
            SLOT: (CUT, RELEASE),
            BEGIN: (CUT, REFUSE),
            FINISH: (CUT, REFUSE),
            BREAK: (ABANDONED,),
            LEAVE: (LEFT, OWN),
        },
        stays=(END, LATE, GO, PART, HEARD, UNSENT),
        never=(READ, ACCEPT),
    ),
    _row(
        GONE,
        {SLOT: (GONE, RELEASE), END: (LOST, WAKE), LEAVE: (LEFT,)},
        # The server drops what is sent.
        stays=(BEGIN, FINISH, LATE, GO, PART, HEARD, UNSENT, BREAK),
        never=(READ, ACCEPT),
    ),
    _row(
        LOST,
        {SLOT: (LOST, RELEASE), LEAVE: (LEFT,)},
        stays=(BEGIN, FINISH, END, LATE, GO, PART, HEARD, UNSENT, BREAK),
        never=(READ, ACCEPT),
    ),
    _row(
        LEFT,
        {SLOT: (LEFT, RELEASE), BEGIN: (LEFT, REFUSE), FINISH: (LEFT, REFUSE)},
        stays=(END, LATE, GO, PART, HEARD, UNSENT),
        never=(READ, ACCEPT, BREAK, LEAVE),
    ),
)

_SENT = (ACCEPT, BEGIN, FINISH)

WEBSOCKET: Table = _table(
    _row(
        READING,
        {READ: (CALLED, ASK)},
        never=(SLOT, *_SENT, END, LATE, GO, PART, HEARD, UNSENT, BREAK, LEAVE),
    ),
    _row(
        CALLED,
        {
            SLOT: (CALLED, RUN),
            ACCEPT: (OPEN,),
            BEGIN: (STARTED,),
            END: (FAILED, WAKE),
            LATE: (CUT, CANCEL, INTERRUPT),
            GO: (GONE, TELL),
            UNSENT: (GONE, CANCEL),
            BREAK: (ABANDONED, CANCEL),
            LEAVE: (LEFT, CANCEL),
        },
        never=(READ, PART, FINISH, HEARD),
    ),
    _row(
        STARTED,
        {
            SLOT: (STARTED, RELEASE),
            FINISH: (COMPLETE,),
            END: (ENDING, WAKE),
            GO: (GONE, TELL),
            UNSENT: (GONE, CANCEL),
            BREAK: (ABANDONED, CANCEL),
            LEAVE: (LEFT, CANCEL),
        },
        stays=(ACCEPT, BEGIN, LATE, HEARD),
        never=(READ, PART),
    ),
    _row(
        OPEN,
        {
            SLOT: (OPEN, RELEASE),
            FINISH: (COMPLETE,),
            END: (CLOSING, WAKE),
            GO: (GONE, TELL),
            UNSENT: (GONE, CANCEL),
            BREAK: (ABANDONED, CANCEL),
            LEAVE: (LEFT, CANCEL),
        },
        stays=(ACCEPT, BEGIN, LATE, HEARD),  # it has no deadline any more
        never=(READ, PART),
    ),
    _row(
        COMPLETE,
        {
            SLOT: (COMPLETE, RELEASE),
            END: (DONE, WAKE),
            UNSENT: (GONE, CANCEL),
            BREAK: (ABANDONED, STOP),
            LEAVE: (LEFT, CANCEL),
        },
        stays=(*_SENT, LATE, GO, HEARD),
        never=(READ, PART),
    ),
    _row(
        FAILED,
        {
            SLOT: (FAILED, RELEASE),
            ACCEPT: (CLOSING,),
            BEGIN: (ENDING,),
            UNSENT: (LOST,),
            BREAK: (ABANDONED,),
            LEAVE: (LEFT, RAISE),
        },
        stays=(END, LATE, GO),
        never=(READ, PART, FINISH, HEARD),
    ),
    _row(
        ENDING,
        {
            SLOT: (ENDING, RELEASE),
            FINISH: (DONE,),
            UNSENT: (LOST,),
            BREAK: (ABANDONED,),
            LEAVE: (LEFT, RAISE),
        },
        stays=(ACCEPT, BEGIN, END, LATE, GO, HEARD),
        never=(READ, PART),
    ),
    _row(
        CLOSING,
        {
            SLOT: (CLOSING, RELEASE),
            FINISH: (DONE,),
            UNSENT: (LOST,),
            BREAK: (ABANDONED,),
            LEAVE: (LEFT, CLOSE),
        },
        stays=(ACCEPT, BEGIN, END, LATE, GO, HEARD),
        never=(READ, PART),
    ),
    _row(
        DONE,
        {
            SLOT: (DONE, RELEASE),
            UNSENT: (LOST,),
            BREAK: (ABANDONED,),
            LEAVE: (LEFT, REPORT),
        },
        stays=(*_SENT, END, LATE, GO, HEARD),
        never=(READ, PART),
    ),
    _NO_ROW,  # TOLD
    _row(
        ABANDONED,
        {
            SLOT: (ABANDONED, RELEASE),
            ACCEPT: (ABANDONED, REFUSE),
            BEGIN: (ABANDONED, REFUSE),
            FINISH: (ABANDONED, REFUSE),
            LEAVE: (LEFT,),
        },
        stays=(END, LATE, GO, HEARD, UNSENT),
        never=(READ, PART, BREAK),
    ),
    _row(
        CUT,
        {
            SLOT: (CUT, RELEASE),
            ACCEPT: (CUT, REFUSE),
            BEGIN: (CUT, REFUSE),
            FINISH: (CUT, REFUSE),
            BREAK: (ABANDONED,),
            LEAVE: (LEFT, OWN),
        },
        stays=(END, LATE, GO, HEARD, UNSENT),
        never=(READ, PART),
    ),
    _row(
        GONE,
        {SLOT: (GONE, RELEASE), END: (LOST, WAKE), LEAVE: (LEFT, EXCUSE)},
        stays=(*_SENT, LATE, GO, HEARD, UNSENT, BREAK),
        never=(READ, PART),
    ),
    _row(
        LOST,
        {SLOT: (LOST, RELEASE), LEAVE: (LEFT, EXCUSE)},
        stays=(*_SENT, END, LATE, GO, HEARD, UNSENT, BREAK),
        never=(READ, PART),
    ),
    _row(
        LEFT,
        {
            SLOT: (LEFT, RELEASE),
            ACCEPT: (LEFT, REFUSE),
            BEGIN: (LEFT, REFUSE),
            FINISH: (LEFT, REFUSE),
        },
        stays=(END, LATE, GO, HEARD, UNSENT),
        never=(READ, PART, BREAK, LEAVE),
    ),
)

RUNNING = frozenset({CALLED, STARTED, OPEN, COMPLETE, TOLD, ABANDONED, CUT, GONE})
"""The states before the end of the call is known."""
OVER = frozenset({FAILED, ENDING, CLOSING, DONE, LOST})
"""The states after the end of the call, before the server's task leaves."""
