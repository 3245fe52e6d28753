"""`ingress top`: what a server is doing, twice a second, on a terminal; in a pipe once."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import localtime, monotonic, strftime

from rich.console import ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ingress.cli import status_tables
from ingress.cli.control_commands import ASK_S, Name, Pid, ask_server, chosen
from ingress.cli.control_socket import CommandError, RunningServer
from ingress.cli.terminal import console, tamed
from ingress.observe.live.view import View

if sys.platform != "win32":
    import termios
    import tty

PAUSE_S = 0.5
_SORT_KEYS = {"n": "name", "r": "rate", "l": "latency", "e": "errors", "u": "queue"}
_ESCAPE = "\x1b"
Keys = Callable[[float], str]
_KEYS = "q quit  p pause  / filter  sort: n name  r rate  l latency  e errors  u queue"


def top(name: Name = None, pid: Pid = None) -> None:
    """Show what a server on this machine is doing, twice a second.

    [dim]ingress top[/dim]

    Deployments with their rates and latencies of the last minute; each replica with the share
    of a processor that its event loop has, its threads and lanes, the code that runs now, and
    the last stall of its loop. In a pipe it prints once.

    [bold]q[/bold] quit, [bold]p[/bold] pause, [bold]/[/bold] filter, and the order:
    [bold]n[/bold] name, [bold]r[/bold] rate, [bold]l[/bold] latency, [bold]e[/bold] errors,
    [bold]u[/bold] queue.
    """
    server = chosen(name, pid)
    screen = Screen()
    if not (console.is_terminal and sys.stdin.isatty()) or sys.platform == "win32":
        console.print(screen.picture(tamed(ask_server(server, "view", ASK_S)), console.width, None))
        return
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        _run(server, screen, live, keys)


def _run(server: RunningServer, screen: Screen, live: Live, keys: Keys) -> None:
    """Ask and show, until the user quits."""
    view: View | None = None
    due = 0.0
    while True:
        if monotonic() >= due and not screen.is_paused:
            try:
                view, screen.problem = tamed(server.ask("view", ASK_S)), ""
            except CommandError as error:
                screen.problem = tamed(str(error))
            except OSError:
                screen.problem = f"server {server.pid} does not answer; it may have ended"
            due = monotonic() + PAUSE_S
        # Not COLUMNS and LINES, which rich takes first: they may be of the shell that set them.
        console.size = size = ConsoleDimensions(*os.get_terminal_size(sys.stdin.fileno()))
        live.update(screen.picture(view, size.width, size.height), refresh=True)
        for key in keys(max(0.05, due - monotonic()) if not screen.is_paused else PAUSE_S):
            if not screen.press(key):
                return


@dataclass(slots=True)
class Screen:
    """The choices of the user, and the picture that they make."""

    sort: str = ""
    wanted: str = ""
    is_typing: bool = False
    is_paused: bool = False
    problem: str = ""

    def press(self, key: str) -> bool:
        """Take a key. Returns False if the user quits."""
        if self.is_typing:
            match key:
                case "\x1b":
                    self.wanted, self.is_typing = "", False
                case "\r" | "\n":
                    self.is_typing = False
                case "\x7f" | "\b":
                    self.wanted = self.wanted[:-1]
                case _ if key.isprintable():
                    self.wanted += key
            return True
        match key:
            case "/":
                self.is_typing, self.wanted = True, ""
            case "p" | " ":
                self.is_paused = not self.is_paused
            case "\x1b":
                self.wanted = ""
            case _:
                self.sort = _SORT_KEYS.get(key, self.sort)
        return key not in ("q", "\x03", "\x04")

    def picture(self, view: View | None, width: int, height: int | None) -> Group:
        """Return the picture of a view in a terminal of this size; `None` is any height."""
        lines: list[RenderableType] = [self._head(view)]
        if view is None:
            return Group(*lines)
        found = status_tables.problems(view, 1000 if height is None else 2 * width - 10)
        several = sum(len(each["deployments"]) for each in view["applications"])
        of_problems = of_deployments = of_replicas = None
        if height is not None:
            # Each table has a head and perhaps a line of what is left out, and an empty line.
            room = height - 2 - 3 - 3
            of_problems = min(len(found), max(1, room // 5))
            room -= sum(len(each.wrap(console, width)) - 1 for each in found[:of_problems])
            of_deployments = min(several, max(1, (room - of_problems) // 2))
            of_replicas = max(1, room - of_problems - of_deployments)
        deployments = status_tables.deployments(
            view, sort=self.sort, wanted=self.wanted, most=of_deployments, charts=width >= 76
        )
        replicas = status_tables.replicas(view, wanted=self.wanted, most=of_replicas)
        lines += [*found[:of_problems], "", deployments, "", replicas]
        if height is not None:
            lines.append(self._foot())
        return Group(*lines)

    def _head(self, view: View | None) -> Text:
        if view is None:
            return Text(self.problem or "asking the server ...")
        head = status_tables.headline(view)
        at = strftime("%H:%M:%S", localtime(view["at"]))
        if self.problem:
            return Text(f"!! {self.problem}; this is of {at}", "bold red")
        if self.is_paused:
            return Text("PAUSED  ", "bold yellow").append(head)
        return Text(f"{at}  ", "dim", no_wrap=True, overflow="ellipsis").append(head)

    def _foot(self) -> Text:
        if self.is_typing or self.wanted:
            text = f"filter: {self.wanted}" + ("_  Enter keep, Esc clear" if self.is_typing else "")
            return Text(text, "bold", no_wrap=True, overflow="ellipsis")
        return Text(_KEYS, "dim", no_wrap=True, overflow="ellipsis")


def _pressed(descriptor: int, timeout_s: float) -> str:
    """Return the characters of the next keys, "" if none was pressed meanwhile."""
    if not select.select([descriptor], [], [], timeout_s)[0]:
        return ""
    if not (data := os.read(descriptor, 64)):
        return "q"  # the terminal has gone
    text = data.decode("utf-8", "replace")
    # The keys with arrows send a sequence that begins as Escape does.
    return text if text == _ESCAPE or not text.startswith(_ESCAPE) else ""


@contextmanager
def _keys() -> Iterator[Keys]:
    """Have standard input in cbreak mode, and yield a function that waits for keys."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        with suppress(KeyboardInterrupt):
            yield partial(_pressed, descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
