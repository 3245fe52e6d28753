from fastapi import FastAPI
from secure import Secure

PACKAGE = "secure"
headers = Secure.with_default_headers()
app = FastAPI()


@app.middleware("http")
async def add_headers(request, call_next):
    response = await call_next(request)
    await headers.set_headers_async(response)
    return response


@app.get("/")
async def root():
    return "root"


REQUESTS = ["GET /", "GET /none"]
HEADERS = ["strict-transport-security", "x-frame-options", "content-security-policy"]
