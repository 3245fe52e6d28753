"""What `ingress` costs and what it gains, measured side by side with what there is.

Commands:

    make bench           python -m benchmarks           plain FastAPI and Starlette, 6 minutes
    make bench-handles   python -m benchmarks.handles   calls between deployments, in one process
    make bench-peers     python -m benchmarks.peers     Ray Serve, LitServe and BentoML
    make bench-document  python -m benchmarks.document  docs/benchmarks, from the results there are
                         python -m benchmarks.steps     what a request costs, step by step

Their modules:

    rows  starts  targets        what is compared with what, and what is required of it
    apps/  guides                the endpoints, and the guide's own benchmarks, for both sides
    servers  load  client        a server in a process of its own, and what asks it
    comparison  results          runs in turn; what they found, and its JSON
    report  charts  document     a table on the terminal, SVG, Markdown
    command                      what the commands have in common
"""
