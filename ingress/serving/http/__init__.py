"""HTTP: from the socket to a call, and from the answer of user code back to the socket.

Requests:

    proxy         from a path to a route to a reply; start here
    in_flight     the replies that are being made, and the answer to a failure
    reply         one request on the HTTP loop; reply_state; client: its client's messages
    asgi_driver   the server's task, which feeds reply_state's tables; direct: without it
    websocket, retrying
    work          the same on the user loop: `receive` and `send` of user code
    body, request_head, asgi_messages, stream_turns; access: its line in the log

Listening:

    server        uvicorn in a thread; server_options, address, admin_address, shared_port
    connections   the connections of a server, and their limits; leaving: their shutdown
    uvicorn_server, uvicorn_connection, compat

It imports `replicas` and what is below it.
"""
