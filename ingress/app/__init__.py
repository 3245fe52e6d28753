"""Applications as their authors declare them. It starts nothing.

    config_file  the file of `ingress run serve.yaml`
    declaration  `@serve.deployment`, `bind`, and the tree of deployments
    asgi         `@serve.ingress`: FastAPI and other ASGI apps on the replicas of a deployment
    batching     `@serve.batch`

A folder imports only the folders below it; `asgi` and `batching` do not import each other.
"""
