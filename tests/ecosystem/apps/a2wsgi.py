from a2wsgi import WSGIMiddleware
from fastapi import FastAPI

PACKAGE = "a2wsgi"


def wsgi(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [environ["PATH_INFO"].encode(), environ["wsgi.input"].read()]


app = FastAPI()
app.mount("/wsgi", WSGIMiddleware(wsgi))


@app.get("/")
def root():
    return "root"


REQUESTS = ["GET /", "GET /wsgi/path", ("POST /wsgi/path", {"content": "body"})]
