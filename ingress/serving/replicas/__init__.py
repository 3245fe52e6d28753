"""Replicas and the queue before them: which replica runs which call, and when.

    router             the queue of a deployment; start here
    admission          whether a replica may get a call now: its slots, its lateness
    two_choices        the usual policy, which chooses a replica
    choosing           runs them, and keeps the replicas that a call waits for
    overload           the policy that orders, sheds and turns away calls under overload
    replica            one replica: the calls that it runs
    host               where its user code runs, and what is known of it there
    thread_host        a host in this process: a loop, worker threads, models
    user_code          the user's class or function in a replica
    collectors         metrics that each replica registers, one in the process
    replica_factories  what a host makes its parts with
    models, multiplex

It imports `declaration`, `asgi` and what is below them; it knows nothing of HTTP servers.
"""
