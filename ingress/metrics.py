"""Counters, gauges and histograms of user code: the classes of `ray.serve.metrics`."""

from ingress.telemetry.metrics import Counter, Gauge, Histogram

__all__ = ["Counter", "Gauge", "Histogram"]
