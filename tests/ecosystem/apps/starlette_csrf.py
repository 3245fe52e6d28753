from fastapi import FastAPI
from starlette_csrf import CSRFMiddleware

PACKAGE = "starlette-csrf"
app = FastAPI()
app.add_middleware(CSRFMiddleware, secret="secret")


@app.get("/")
async def root():
    return "root"


@app.post("/")
async def post():
    return "accepted"


def talk(client):
    token = client.cookies["csrftoken"]
    return [
        client.post("/", headers={"x-csrftoken": token}).status_code,
        client.post("/").status_code,
    ]


REQUESTS = ["GET /"]
