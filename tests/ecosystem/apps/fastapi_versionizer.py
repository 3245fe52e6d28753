from fastapi import FastAPI
from fastapi_versionizer import Versionizer, api_version

PACKAGE = "fastapi-versionizer"
app = FastAPI()


@api_version(1)
@app.get("/items")
def first():
    return "first"


@api_version(2)
@app.get("/items")
def second():
    return "second"


Versionizer(app=app, prefix_format="/v{major}", semantic_version_format="{major}").versionize()
REQUESTS = ["GET /v1/items", "GET /v2/items"]
