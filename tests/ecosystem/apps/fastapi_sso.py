from fastapi import FastAPI
from fastapi_sso.sso.google import GoogleSSO

PACKAGE = "fastapi-sso"
sso = GoogleSSO("id", "secret", "http://localhost/callback", allow_insecure_http=True)
app = FastAPI()


async def discovery(self=None):
    return {
        "authorization_endpoint": "http://localhost/authorize",
        "token_endpoint": "http://localhost/token",
        "userinfo_endpoint": "http://localhost/me",
    }


sso.get_discovery_document = discovery


@app.get("/login")
async def login():
    async with sso:
        return await sso.get_login_redirect(state="state")


REQUESTS = ["GET /login", "GET /login"]
VOLATILE = [r"code_challenge=[^&]*"]
