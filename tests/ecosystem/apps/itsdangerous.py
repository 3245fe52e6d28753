from fastapi import FastAPI, Request
from starlette.middleware.sessions import SessionMiddleware

PACKAGE = "itsdangerous"
app = FastAPI()
app.add_middleware(SessionMiddleware, secret_key="secret")


@app.get("/count")
async def count(request: Request):
    request.session["count"] = request.session.get("count", 0) + 1
    return request.session["count"]


REQUESTS = ["GET /count"] * 4
