"""`ingress check`: what blocks an event loop, and what is not safe in a thread.

    rules       what is looked for
    findings    what was found
    sources     the user's files, parsed: functions, and what a name in them stands for
    calls       which of the user's functions a call runs
    state       what attributes and globals are made of
    subjects    what an application calls, and where that runs
    decorated   the same of files that nobody imports
    blocking    blocking calls on an event loop, with ruff
    migration   what is not safe once it runs in a thread:
    sharing       what is read and then written
    affinity      what belongs to a loop, or to one thread
    checker     one check
    report      as text, JSON, SARIF and annotations

    trial       `--run`: what the user's tests decide of it
    plugin        inside pytest
    rehearsal     calls from many threads, on an instance that serves no more
    tracing       which of their writes came too late

Only the command line imports it.
"""
