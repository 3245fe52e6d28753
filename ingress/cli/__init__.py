"""The command line: `ingress run`, `build`, `explain`, `check`, `migrate`, `new` and others.

Commands, each the function of a command line:

    commands         the commands and their options; start here
    run_command      the options of `run`, in the table of run_options, and those from a file
    run_server       the work of `run`
    *_command        one command each; cluster_commands: those for Ray
    target, terminal the application that a command is for, and its output

The supervisor, with `ingress run --workers`:

    workers          the processes and their supervisor
    worker           the work of one process; reloading, replacing: of the file, of a server;
                     keeping: of the code, beside modules that stay

The control channel to a running server:

    control_commands the commands, and their progress
    control_socket   the socket and its answers
    server_commands  the answers of one process; worker_commands: of all workers

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
