"""A timeline of requests: the threads they ran in, and their waits.

    recorder   the last requests, and each time span that a request ran in a thread
    instrumentation
               the router, replica and worker threads that feed a recorder; the engine makes them
               while `record` is among its instruments
    sampling   some seconds of a running server, whose threads are read from outside: the page,
               and `ingress profile`
    chrome     a timeline as Chrome Trace Event JSON, for Perfetto and chrome://tracing; the recent
               requests of a running server, in a file: `INGRESS_TRACE`
    picture    a timeline as SVG

The request path has none of this code unless an application is started with a recorder. It imports
`control` and the folders below it.
"""
