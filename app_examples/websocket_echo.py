"""A WebSocket on a class method: every message of a connection reaches the same replica.

    ingress run app_examples.websocket_echo:app

    curl http://127.0.0.1:8000/    "connect a WebSocket to /echo"
    python -m websockets ws://127.0.0.1:8000/echo

Type a line and see it come back with its number on this connection. Ctrl-C in the server's terminal
closes the connection with 1001, and a connection that ends frees its slot at once.
"""

from fastapi import FastAPI, WebSocket, WebSocketDisconnect

import ingress as serve

api = FastAPI()


@serve.deployment(num_replicas=2)
@serve.ingress(api)
class Echo:
    @api.get("/")
    async def hint(self) -> str:
        return "connect a WebSocket to /echo"

    @api.websocket("/echo")
    async def echo(self, websocket: WebSocket) -> None:
        await websocket.accept()
        number = 0
        try:
            async for text in websocket.iter_text():
                number += 1
                await websocket.send_text(f"{number}: {text}")
        except WebSocketDisconnect:
            print("gone while we were sending")


app = Echo.bind()
