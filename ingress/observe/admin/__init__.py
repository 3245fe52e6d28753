"""The admin listener: `/metrics` and `/api/snapshot`, read only, for operators and Prometheus.

    listener    its thread, loop and socket; its routes, and the guard before them: Host, Origin,
                token, security headers; the snapshot that all viewers share
    exposition  a snapshot as text for Prometheus, with the routes that are named there
    families    the names, types and labels of the metrics

It has a thread and a loop of its own, and shares none with requests. It reads what the process, or
the supervisor of several workers, has summed.
"""
