from fastapi import FastAPI, Request
from starsessions import InMemoryStore, SessionAutoloadMiddleware, SessionMiddleware

PACKAGE = "starsessions"
store = InMemoryStore()
app = FastAPI()
app.add_middleware(SessionAutoloadMiddleware)
app.add_middleware(SessionMiddleware, store=store, lifetime=3600, cookie_https_only=False)


@app.get("/count")
async def count(request: Request):
    request.session["count"] = request.session.get("count", 0) + 1
    return request.session["count"]


REQUESTS = ["GET /count"] * 4
