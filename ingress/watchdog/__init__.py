"""The watchdog: an event loop that does not turn is noticed, and who is in its way is named.

    every 25 ms    a loop whose thread is in a callback gets a heartbeat, one that waits gets none
    25 ms later    if that was not answered, see where the thread is, again and again until it is
    after 100 ms   it is a stall: a record, a count in `serve.status()`, and in `serve.stalls()`

    thread         the one thread that does it, for all loops that user code lives on
    sampler        what it does each time
    loop_probe     one loop: its heartbeats, what was seen of it, and whose fault that is
    stacks         what a thread is doing, read from its frames
    clocks         what the system knows of threads: who ran, who waited for the GIL
    records        what is remembered and logged

Requests pay nothing for it: a loop that turns has one callback more in 25 ms.
"""

from ingress.watchdog.records import Holder, Stall, StallReason
from ingress.watchdog.thread import Watchdog

__all__ = ["WATCHDOG", "Holder", "Stall", "StallReason", "Watchdog"]

WATCHDOG = Watchdog()
"""That of this process."""
