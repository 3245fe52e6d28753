"""The records that running code leaves: log records, metrics of user code, stalls of event loops.

    logs       the identity of each record, its format, and the threads that write it
    metrics    `serve.metrics`: the counters, gauges and histograms of user code
    watchdog   detects event loops that stall, and names the code that stalls them

These folders do not import each other. A replica feeds them; `observe` reads them.
"""
