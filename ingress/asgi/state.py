"""`app.state`, one per replica, under the name the user already has."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import State

from ingress.context import REPLICA


class StateView(State):
    """What `app.state` of the user's app becomes. Thread-safe.

    Inside a replica it is that replica's state, elsewhere the one it always was. Otherwise
    `app.state.model` in a handler, the commonest idiom there is, would look into the app that
    serves nothing.
    """

    def __init__(self, state: State) -> None:
        object.__setattr__(self, "_outside", state._state)

    @property
    def _state(self) -> dict[str, Any]:  # type: ignore[override]
        replica = REPLICA.get(None)
        app = None if replica is None else replica._asgi_app
        state = app.state if isinstance(app, Starlette) else None
        # A replica may touch the app of another deployment: only its own app's state is its own.
        if isinstance(state, ReplicaState) and state._view is self:
            return state._state
        outside: dict[str, Any] = self.__dict__["_outside"]
        return outside


class ReplicaState(State):
    """The state of one replica; it starts with what the app's had."""

    _view: StateView

    def __init__(self, view: StateView) -> None:
        super().__init__(dict(view.__dict__["_outside"]))
        object.__setattr__(self, "_view", view)


def view_of(app: Starlette) -> StateView:
    """Return the view that is the app's `state`, and make it at the first call.

    The caller holds the lock of `apps`: two deployments may share the app.
    """
    if not isinstance(app.state, StateView):
        app.state = StateView(app.state)
    return app.state
