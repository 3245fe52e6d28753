from fastapi import Depends, FastAPI
from fastapi_limiter.depends import RateLimiter
from pyrate_limiter import Duration, Limiter, Rate

PACKAGE = "fastapi-limiter"
limiter = Limiter(Rate(2, Duration.MINUTE))
app = FastAPI()


@app.get("/async", dependencies=[Depends(RateLimiter(limiter=limiter))])
async def of_async():
    return "async"


@app.get("/sync", dependencies=[Depends(RateLimiter(limiter=limiter))])
def of_sync():
    return "sync"


REQUESTS = ["GET /async", "GET /sync"] * 3
