"""Execution of user code: on the event loop, in a worker thread, or in a lane.

    execution    the rule, the plan of one callable, and the containment of its errors; start here
    threads      a bounded pool of worker threads, and the executor of a user loop
    lanes        `@serve.method` and `lanes=`; lane_pools: all threads of one replica
    errors       errors whose attributes cannot be read, and those of another event loop
    gil_pressure many threads want the GIL at once: turns get shorter

It imports `calls`, `config`, `exceptions` and `base`.
"""
