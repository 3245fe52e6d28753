from fastapi import FastAPI
from fastapi_pagination import Page, add_pagination, paginate

PACKAGE = "fastapi-pagination"
app = FastAPI()


@app.get("/items", response_model=Page[int])
async def items():
    return paginate(list(range(100)))


@app.get("/sync")
def sync_items() -> Page[int]:
    return paginate(list(range(5)))


add_pagination(app)
REQUESTS = ["GET /items", "GET /items?page=2&size=3", "GET /items?page=0", "GET /sync?size=2"]
