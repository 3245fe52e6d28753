from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse
from fastapi.templating import Jinja2Templates
from jinja2 import DictLoader, Environment

PACKAGE = "jinja2"
pages = {"page.html": "{{ name }} {{ url_for('page', name='b') }}"}
templates = Jinja2Templates(env=Environment(loader=DictLoader(pages)))
app = FastAPI()


@app.get("/page/{name}", response_class=HTMLResponse)
def page(request: Request, name: str):
    return templates.TemplateResponse(request, "page.html", {"name": name})


REQUESTS = ["GET /page/a"]
