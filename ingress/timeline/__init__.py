"""A timeline of what requests did: where each ran, and what it waited for.

    recorder   the last requests, and each stretch of time that one ran in a thread
    instrumentation
               the router, replica and worker threads that feed it, made only where one records
    chrome     the same as Chrome Trace Event JSON, for Perfetto and chrome://tracing
    picture    the same as SVG
    client     the requests that `ingress trace` makes
    window     the recent past of a server that runs, in a file: `INGRESS_TRACE`

Nothing of it is on the way of a request unless an application is started with a recorder.
"""
