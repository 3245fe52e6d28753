"""`ingress check`: code that blocks an event loop, and code that is not safe in a thread.

    rules       the rules, with their ids and fixes; findings, and the report of a check, as text,
                JSON, SARIF and annotations
    sources     the user's files, parsed: functions, values of names, calls between functions
    state       the values of attributes and globals
    subjects    the functions that an application calls, and where they run; the same for files
                that are not imported
    blocking    blocking calls on an event loop, with ruff
    races       shared state that several threads read and then write
    affinity    objects that belong to an event loop or a thread
    checker     one check; with `--migrate`, of code that is not safe once it runs in a thread

Only the command line imports it.
"""
