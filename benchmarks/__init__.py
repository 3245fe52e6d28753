"""Benchmarks: the costs and gains of `ingress`, measured side by side with other servers.

Commands:

    make bench           python -m benchmarks           plain FastAPI and Starlette, 6 minutes
    make bench-handles   python -m benchmarks.handles   calls between deployments, in one process
    make bench-peers     python -m benchmarks.peers     Ray Serve, LitServe, BentoML and mosec
    make bench-document  python -m benchmarks.document  docs/benchmarks, from the stored results
                         python -m benchmarks.steps     the cost of a request, step by step

Their modules:

    rows  starts  targets        comparisons, and their requirements
    apps/  guides                the endpoints, and the guide's own benchmarks, for both sides
    servers  load  client        a server in a separate process, and its clients
    comparison  results          runs in turn; their results, as JSON too
    report  charts  document     a table on the terminal, SVG, Markdown
    command                      code shared by the commands
"""
