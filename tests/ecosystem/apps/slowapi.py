from fastapi import FastAPI, Request
from slowapi import Limiter, _rate_limit_exceeded_handler
from slowapi.errors import RateLimitExceeded
from slowapi.util import get_remote_address

PACKAGE = "slowapi"
limiter = Limiter(key_func=get_remote_address)
app = FastAPI()
app.state.limiter = limiter
app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)


@app.get("/async")
@limiter.limit("2/minute")
async def of_async(request: Request):
    return "async"


@app.get("/sync")
@limiter.limit("2/minute")
def of_sync(request: Request):
    return "sync"


REQUESTS = ["GET /async", "GET /sync"] * 3
