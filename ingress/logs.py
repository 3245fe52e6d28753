"""Log records with the ids of their request and replica, for handlers of your own."""

from ingress.telemetry.logs import RequestFilter

__all__ = ["RequestFilter"]
