"""HTTP: from the socket to a call, and from the answer of user code back to the socket.

    server       uvicorn in a thread; uvicorn_server: how it leaves; connections, body: limits
    proxy        from a path to a route to an exchange; start here
    exchange     one request between the server's loop and the replica's; websocket, retrying
    transport    `receive` and `send` of user code; client_reader: what the client sends
    messages, origin, leaving, uvicorn_connection, shared_port

It imports `replicas` and what is below it.
"""
