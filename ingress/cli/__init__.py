"""The command line: `ingress run`, `build`, `explain`, `check`, `trace` and `openapi`.

    commands     the commands and their options; start here
    serving      what `run` does; worker, workers: its processes
    target, terminal, trace_command

It may import every other folder; none imports it.
"""

from ingress.cli.commands import main

__all__ = ["main"]
