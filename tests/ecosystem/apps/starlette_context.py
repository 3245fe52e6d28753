from fastapi import FastAPI
from starlette_context import context, plugins
from starlette_context.middleware import RawContextMiddleware

PACKAGE = "starlette-context"
app = FastAPI()
app.add_middleware(RawContextMiddleware, plugins=(plugins.UserAgentPlugin(),))


@app.get("/async")
async def of_async():
    context["seen"] = True
    return context.data


@app.get("/sync")
def of_sync():
    return context.data


REQUESTS = [(f"GET /{kind}", {"headers": {"User-Agent": "me"}}) for kind in ("async", "sync")]
