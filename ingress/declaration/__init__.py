"""What a user writes: `@deployment`, `.bind()` and the tree of deployments that results.

    declaration  `Deployment`, and `Application`, which is also an ASGI app; start here
    build        the tree, flattened into named deployments
    module_app   `MODULE:APP`, the name of an application outside of Python

It imports `asgi`, `batching` and what is below them; it never runs user code.
"""
