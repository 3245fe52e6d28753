"""HTTP: from the socket to a call, and from the answer of user code back to the socket.

    server       uvicorn in a thread; uvicorn_server: its shutdown; connections, body: limits
    proxy        from a path to a route to a reply; start here
    in_flight    the replies that are being made, and the answer to a failure
    reply        one request on the HTTP loop; client: its client's messages; websocket, retrying
    work         the same on the user loop: `receive` and `send` of user code
    asgi_messages, request_head, leaving, uvicorn_connection, shared_port

It imports `replicas` and what is below it.
"""
