"""The seam for observers: the factories with which an engine makes the parts of applications.

    with local_engine().instrumented(instrument): ...      instrument: Factories -> Factories

    timeline.instrumentation   router, replica, process_host, threads, plan
    testing.clock              new_loop

They import from here what they subclass. An instrument changes no object and no class that exists:
it chooses the classes of the parts that are made meanwhile. An application that starts without
instruments has none of their code on the path of its requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ingress.serving.processes.process_host import ProcessHost
from ingress.serving.replicas.host import Host
from ingress.serving.replicas.replica import Replica
from ingress.serving.replicas.router import Router
from ingress.serving.replicas.thread_host import ReplicaFactories, ThreadHost

__all__ = ["Factories", "Host", "Instrument", "ProcessHost", "Replica", "Router"]


@dataclass(frozen=True, slots=True)
class Factories(ReplicaFactories):
    """The factories of an application's parts. Each takes the arguments of its default."""

    router: Callable[..., Router] = Router
    replica: Callable[..., Replica] = Replica
    thread_host: Callable[..., Host] = ThreadHost
    process_host: Callable[..., Host] = ProcessHost


Instrument = Callable[[Factories], Factories]
"""A function that gets the factories in use, and returns those to use in their place."""
