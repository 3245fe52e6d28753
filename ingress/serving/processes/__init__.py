"""Replicas in child processes: `@serve.deployment(isolation="process")`.

    the server's process                                 a child process for each replica
    Router -> Replica -> RemoteCode  == frames ==          FrameServer -> Replica -> user code

    process_host     the host of the replica that the router knows, and its user code, which sends
                     what `UserCode` would do; start here
    link             the server's end of a child: its process, its frames, its end
    remote_calls     calls in a child, as its server sees them
    engines/child    the main function of a child, above this folder
    frame_server     the calls in a child
    hosted_call      one of these calls, and the messages of its request
    child_calls      the calls that a child makes by handle: its handles, and the server's end
    frames           the framing: messages over an inherited socket pair, pickled, in both
                     directions; uploaded files, as they travel
    messages         the kinds of frames and their contents; how much may be on its way, in each
                     direction
    code             the user's class and its arguments, as they travel
    crossing         exceptions that cross, and errors of values that cannot
    output           its standard output and error, and its log records
    shared_memory    large contents, and the few numbers that a child leaves behind if it is killed
    resources        the environment of a child: variables, native threads, GPUs
    child_process    the operating system's side: start a process, wait for its end
    fork_server      a process that forks children, with the user's module

A child runs a `Replica` with a `ThreadHost`, as the server's process does: lanes,
batches, models, lifespans and the watchdog work there as here. The router's slots are counted here.
Pickle crosses inherited socket pairs only.
"""
