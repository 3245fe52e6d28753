from fastapi import FastAPI
from fastapi_mcp import FastApiMCP

PACKAGE = "fastapi-mcp"
app = FastAPI()


@app.get("/add", operation_id="add")
async def add(a: int, b: int):
    return a + b


FastApiMCP(app).mount_http()


def talk(client):
    headers = {"Accept": "application/json, text/event-stream"}

    def call(method, **params):
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        answer = client.post("/mcp", json=message, headers=headers)
        headers.setdefault("mcp-session-id", answer.headers.get("mcp-session-id", ""))
        return answer.json()

    call(
        "initialize",
        protocolVersion="2025-03-26",
        capabilities={},
        clientInfo={"name": "t", "version": "1"},
    )
    client.post(
        "/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=headers
    )
    return [call("tools/list"), call("tools/call", name="add", arguments={"a": 1, "b": 2})]


REQUESTS = ["GET /add?a=1&b=2"]
