"""One request from its submission to its answer, and the event loops it moves between.

    call         the request: its state, its answer, its cancellation; start here
    loops        a thread with an event loop, and `Mailbox`, for calls into it
    channel      a bounded stream from one loop or thread to another
    spawning     processes that user code starts: one loop forks at a time
    compat       the private names of AnyIO: cancelling a task once
    slots        the record that a router keeps of a replica: its slots, counts of its calls
    deadlines, deadlocks, retries

It imports `exceptions` and `base`.
"""
