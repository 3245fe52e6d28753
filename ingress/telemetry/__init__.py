"""The records that running code leaves: log records, metrics, stalls of event loops, tracebacks.

    logs       the identity of each record, its format, and the threads that write it
    metrics    `serve.metrics`: the counters, gauges and histograms of user code
    watchdog   detects event loops that stall, and names the code that stalls them
    mistakes   errors of a module for its author; tracebacks: those of user code, for the log

The folders do not import each other. A replica feeds them; `observe` reads them.
"""
