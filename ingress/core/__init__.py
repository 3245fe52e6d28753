"""The core: values of settings and options, one call, and the place where user code runs.

    execution  the plan of a callable: the loop, a worker thread, a lane
    calls      one call from its submission to its answer; event loops and what crosses them
    base       settings, options, identities, counters; independent of requests

A folder imports only the folders below it. Of the package it imports `exceptions` alone.
"""
