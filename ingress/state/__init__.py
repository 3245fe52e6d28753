"""The state of a server at one moment: the window through which all views see it.

    server        `Snapshot`: the document, taken of this process, and summed over worker processes
    applications  its applications, those that start, run or failed to start; `serve.status()`
    deployments   their deployments and replicas, with their counters
    looking       a `Look`: the document, and what runs on each replica now, in children too
    running       what runs on the replicas of one process
    memory        what grows in a process

Each module has the shape of its part of the document, how it is taken, and how those of several
processes are summed: a new field is added in one module. `serve.status()`, `/metrics`, the page,
`ingress top`, `ingress status`, and the problems in the log read these documents, and no other part
of the server. Start in `server`.
"""
