"""The server: requests come in, and replicas run them.

    control    decides which replicas run; starts, checks, replaces and stops them
    processes  replicas in child processes
    http       from the socket to a call, and from its answer back to the socket
    replicas   the queue of a deployment, and the replicas that take calls from it

A folder imports only the folders below it; `processes` and `http` do not import each other. Read
`replicas` first.
"""
