"""FastAPI and other ASGI apps on the replicas of a deployment.

    spec          the decorator; what it records; the app bound once per deployment
    apps          the clone of the app each replica gets
    routes        the clone of the route tree, endpoints wrapped
    route_index   the route of a path, looked up
    template      the path template of the route that was found
    lean          a route without the exit stacks it does not need
    dependencies  `Depends(...)` on the replica's threads and instance
    parts         what it consists of, for `ingress explain`
    methods       whose function it is, and what runs for it
    state         `app.state`, one per replica
    replica_app   the ASGI app of one replica
    lifespan      its start-up and shutdown
    telemetry     whether FastAPI's is on
    guard         failures stay inside their request

Only these modules touch FastAPI's route internals.
"""

from ingress.asgi.parts import Part
from ingress.asgi.replica_app import ASGI, ReplicaApp
from ingress.asgi.routes import RouteInfo
from ingress.asgi.spec import BoundApp, IngressSpec, ingress
from ingress.asgi.template import RouteTemplates, route_template

__all__ = [
    "ASGI",
    "BoundApp",
    "IngressSpec",
    "Part",
    "ReplicaApp",
    "RouteInfo",
    "RouteTemplates",
    "ingress",
    "route_template",
]
