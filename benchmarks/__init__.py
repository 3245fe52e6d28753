"""Plain FastAPI against `ingress`; run it with `python -m benchmarks`."""
