"""The admin listener: `/metrics` and `/api/snapshot`, read only, for operators and Prometheus.

    listener   its thread, loop and socket
    app        its routes, and the guard before them: Host, Origin, token, security headers
    exposition a snapshot as text for Prometheus
    families   the names, types and labels of the metrics
    route_limit  the routes that are named there, if there are many
    source     the snapshot that all viewers share

It has a thread and a loop of its own, and shares none with requests. It reads what the process, or
the supervisor of several workers, has summed. Start in `app`.
"""
