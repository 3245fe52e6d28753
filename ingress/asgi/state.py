"""`app.state`, one per replica, available under the user's own `app`."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import State

from ingress.context import REPLICA


class StateView(State):
    """The replacement of `app.state` in the user's app. Thread-safe.

    Inside a replica, it shows that replica's state, elsewhere the original state. Otherwise
    `app.state.model` in a handler, a very common idiom, would read the state of the user's app,
    which serves no requests.
    """

    def __init__(self, state: State) -> None:
        object.__setattr__(self, "_outside", state._state)

    @property
    def _state(self) -> dict[str, Any]:  # type: ignore[override]
        replica = REPLICA.get(None)
        app = None if replica is None else replica.asgi_app
        state = app.state if isinstance(app, Starlette) else None
        # A replica may use the app of another deployment, which has no state of this replica.
        if isinstance(state, ReplicaState) and state._view is self:
            return state._state
        outside: dict[str, Any] = self.__dict__["_outside"]
        return outside


class ReplicaState(State):
    """The state of one replica; it starts as a copy of the app's state."""

    _view: StateView

    def __init__(self, view: StateView) -> None:
        super().__init__(dict(view.__dict__["_outside"]))
        object.__setattr__(self, "_view", view)


def view_of(app: Starlette) -> StateView:
    """Return the app's `StateView`; the first call sets it as the app's `state`.

    The caller holds the lock of `apps`: two deployments may share the app.
    """
    if not isinstance(app.state, StateView):
        app.state = StateView(app.state)
    return app.state
