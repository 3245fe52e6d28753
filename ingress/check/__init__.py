"""`ingress check`: what blocks an event loop, and what is not safe in a thread.

    rules      what is looked for
    findings   what was found
    sources    the user's files, parsed
    calls      which of the user's functions a call runs
    subjects   what code there is, and where it runs
    blocking   blocking calls on an event loop, with ruff
    report     as text, JSON, SARIF and annotations

Only the command line imports it.
"""
