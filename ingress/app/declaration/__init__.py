"""Declarations by the user: `@deployment`, `.bind()` and the resulting tree of deployments.

    declaration      `Deployment`, and `Application`, which is also an ASGI app; start here
    build            the tree, flattened into named deployments
    cluster_options  the options that one process cannot fulfil
    names            the rules for names, and the name of a class for another process
    module_app       `MODULE:APP`, the name of an application outside of Python

It imports `asgi`, `batching` and the folders below them; it never runs user code.
"""

from ingress.app.declaration.declaration import Application, Deployment, deployment

__all__ = ["Application", "Deployment", "deployment"]
