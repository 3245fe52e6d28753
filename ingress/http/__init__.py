"""HTTP: from the socket to a call, and from the answer of user code back to the socket.

    server       uvicorn in a thread; uvicorn_server: its shutdown; connections, body: limits
    proxy        from a path to a route to an exchange; start here
    in_flight    the exchanges that are served, and the answer to a failure
    exchange     one request between the HTTP loop and the user loop; websocket, retrying
    transport    `receive` and `send` of user code; client_reader: the client's messages
    messages, origin, request_head, leaving, uvicorn_connection, shared_port

It imports `replicas` and what is below it.
"""
