"""FastAPI and other ASGI apps on the replicas of a deployment.

Binding, once for each deployment:

    spec             the decorator, its record, and the app, bound once per deployment
    apps             the clone of the app for each replica
    routes           the clone of the route tree, with wrapped endpoints
    dependencies     `Depends(...)` on the replica's threads and instance
    wrapped          the user's layers around a route's app
    methods          the rule for `self`, and the signatures that FastAPI reads
    users_app        the user's `app`, which is the clone inside of a replica
    parts            the user's callables in an app, for `ingress explain`
    unserved_routes  routes that no deployment serves

Serving, for each replica and request:

    replica_app      the ASGI app of one replica, and FastAPI's layers around its routes
    lifespan         its start-up and shutdown
    guard            containment of failures in their request
    template         the path template of the route that was found
    responses, chunks, bad_results
    cors             the headers for CORS of answers that the server makes in its place
    unbound          the answer of an app that is served without its deployment

Acceleration:

    route_index      the lookup of a path's route
    compiled         a route's `app` without the work that FastAPI repeats at each request
    steps, streams, rendering, received_headers
    compat           the private names of FastAPI and Starlette
    known            the versions that compiled routes were compared with

Only these modules touch FastAPI's route internals.
"""
