"""`ingress check`: code that blocks an event loop, and code that is not safe in a thread.

    rules       the rules, with their ids and fixes; findings, and the report of a check
    sources     the user's files, parsed: functions, values of names, calls between functions
    state       the values of attributes and globals
    subjects    the functions that an application calls, and where they run
    decorated   the same for files that are not imported
    blocking    blocking calls on an event loop, with ruff
    races       shared state that several threads change
    sharing     shared state that is read and then written
    affinity    objects that belong to an event loop or a thread
    checker     one check; with `--migrate`, of code that is not safe once it runs in a thread
    report      a report as text, JSON, SARIF and annotations

Only the command line imports it.
"""
