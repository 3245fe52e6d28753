"""The watchdog: it detects event loops that stall, and names the code that stalls them.

    every 25 ms    a loop whose thread runs a callback gets a heartbeat; an idle loop gets none
    25 ms later    without an answer, sample the thread's stack, repeatedly until the answer comes
    after 100 ms   the loop stalls: a log record, a count in `serve.status()`, in `serve.stalls()`

    thread         the watchdog's thread, one for all loops that run user code
    sampler        one look at every loop
    loop_probe     one loop: its heartbeats, its samples and the cause of its stall
    stacks         a thread's activity, read from its frames
    clocks         the system's clocks of threads: run time, and waits for the GIL
    records        the stalls that are kept and logged

Requests pay nothing for the watchdog: a busy loop has one more callback per 25 ms.
"""

from ingress.telemetry.watchdog.records import Holder, Stall, StallReason
from ingress.telemetry.watchdog.thread import Watchdog

__all__ = ["WATCHDOG", "Holder", "Stall", "StallReason", "Watchdog"]

WATCHDOG = Watchdog()
"""The watchdog of this process."""
