"""The views that an engine starts with its applications. Engines import none themselves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ingress.serving.control.factories import Instrument
    from ingress.serving.http.admin_address import AdminOptions
    from ingress.state.server import Server


class Recording(Protocol):
    """A file of the recent requests: `INGRESS_TRACE`."""

    def writing_on_signal(self) -> AbstractContextManager[None]:
        """Make a signal write the file, while this context is open."""

    def stop(self, timeout_s: float) -> None:
        """Write the file for the last time."""


class Views(Protocol):
    """The views that an engine starts with its applications. Engines import none themselves."""

    def listen(self, server: Server, options: AdminOptions, /) -> tuple[str, Callable[[], None]]:
        """Start an admin listener. Returns its URL, and a function that stops it.

        Raises `RuntimeError` if its address is busy.
        """

    def record(self, path: str, /) -> tuple[Recording, Instrument]:
        """Start a recording. Returns it, and the instrument for applications that start.

        Raises `ValueError` if the file cannot be written.
        """


VIEWS: Views
"""The views of the room above, which `ingress.api` sets."""
