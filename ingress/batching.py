"""`@serve.batch`, at its place in `ray.serve.batching`."""

from ingress.app.batching import batch

__all__ = ["batch"]
