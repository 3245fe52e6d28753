"""The recent requests of a running server, in a file: `INGRESS_TRACE=trace.json`.

The file is written when the process gets SIGUSR2, and when its last application ends.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

from ingress.core.base.signals import handling
from ingress.observe.timeline.chrome import as_json
from ingress.observe.timeline.recorder import Recorder

logger = logging.getLogger("ingress")


class Window:
    """A recorder of a running server, and the thread that writes its file. Thread-safe.

    "{pid}" in `path` becomes the process's id. Raises `ValueError` if the file cannot be written.
    """

    __slots__ = ("_asked", "_path", "_thread", "recorder")

    def __init__(self, path: str) -> None:
        self._path = Path(path.replace("{pid}", str(os.getpid())))
        check_writable(self._path, "INGRESS_TRACE")
        self.recorder = Recorder().__enter__()
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="ingress-trace", daemon=True)
        self._thread.start()

    def writing_on_signal(self) -> AbstractContextManager[None]:
        """Make SIGUSR2 write the file, unless it has a handler or this is not the main thread."""
        return handling("SIGUSR2", self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Not an `Event`: the line that the signal interrupts may hold the event's lock.
        self._asked.put(True)

    def stop(self, timeout_s: float) -> None:
        """Write the file for the last time."""
        self._asked.put(False)
        self._thread.join(timeout_s)
        self.recorder.__exit__()

    def _main(self) -> None:
        goes_on = True
        while goes_on:
            goes_on = self._asked.get()
            try:
                self._write()
            except Exception:
                logger.exception("the trace of requests could not be written to %s", self._path)

    def _write(self) -> None:
        timelines = self.recorder.timelines()
        text = as_json(timelines, f"ingress, process {os.getpid()}")
        # Replaced in one step, because another process may be reading the file.
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        part.unlink(missing_ok=True)
        with part.open("x") as file:  # follows no link: the folder may be one of all users
            file.write(text)
        part.replace(self._path)
        logger.info("wrote the trace of %d requests to %s", len(timelines[0].journeys), self._path)


def check_writable(path: Path, what: str) -> None:
    """Raise `ValueError` if a file cannot be written. The file is not changed."""
    problem = ""
    if path.is_dir():
        problem = "it is a folder"
    elif not path.parent.is_dir():
        problem = f"there is no folder {str(path.parent)!r}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "permission denied"
    if problem:
        raise ValueError(f"{what}={str(path)!r} cannot be written: {problem}; give another path")
