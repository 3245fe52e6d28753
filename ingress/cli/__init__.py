"""The command line: `ingress run`, `build`, `explain`, `check`, `trace` and `openapi`.

    commands     the commands and their options; start here
    serving      the work of `run`; worker, workers: its processes
    target, terminal, trace_command

It may import every other folder; no folder imports it.
"""

from ingress.cli.commands import main

__all__ = ["main"]
