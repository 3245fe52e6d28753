"""The command line: `ingress run`, `build`, `explain`, `check`, `trace` and `openapi`.

    commands     the commands and their options; start here
    run_command  the options of `run`
    serving      the work of `run`; worker, workers: its processes
    target, terminal, trace_command

It may import every other folder; no folder imports it.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line: the console script `ingress`."""
    # Not at import: worker processes import a module of this folder, and none of the commands.
    try:
        from ingress.cli.commands import main as run

        run()
    except KeyboardInterrupt:  # while the commands are imported
        sys.exit(130)
