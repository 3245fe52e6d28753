"""`serve.metrics`: counters, gauges and histograms of user code, as in `ray.serve.metrics`.

    counter = serve.metrics.Counter("my_counter", description="...", tag_keys=("model",))
    counter.inc(tags={"model": "small"})

`/metrics` shows them with the tags of their replica: application, deployment and replica. Their
names are spelled as on Ray: `ray_my_counter_total`. On Ray they are Ray's own. Source: Ray 2.60.0,
metrics.py.
"""

from ingress.telemetry.metrics.user_metrics import Counter, Gauge, Histogram

__all__ = ["Counter", "Gauge", "Histogram"]
