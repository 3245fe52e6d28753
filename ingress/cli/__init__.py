"""The command line: `ingress run`, `build`, `explain`, `check`, `migrate`, `new` and others.

    commands     the commands and their options; start here
    run_options  the options of `run`, in one table; run_command hands them on
    serving      the work of `run`; worker, workers: its processes
    target, terminal, trace_command

It may import every other folder; no folder imports it.
"""

from __future__ import annotations

import sys

from ingress.core.base.ctrl_c import INTERRUPTED, begin_command, say_stopped


def main() -> None:
    """Run the command line: the console script `ingress`."""
    try:
        # Not at import: worker processes import a module of this folder, and none of the commands.
        from ingress.cli.commands import main as run

        begin_command()
        run()
    except KeyboardInterrupt:
        say_stopped()
        sys.exit(INTERRUPTED)
