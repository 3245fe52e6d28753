from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi_csrf_protect import CsrfProtect
from fastapi_csrf_protect.exceptions import CsrfProtectError

PACKAGE = "fastapi-csrf-protect"
app = FastAPI()


@CsrfProtect.load_config
def config():
    return [("secret_key", "secret")]


@app.exception_handler(CsrfProtectError)
def refused(request: Request, error: CsrfProtectError):
    return JSONResponse(status_code=error.status_code, content=error.message)


@app.get("/form")
def form(csrf: CsrfProtect = Depends()):
    token, signed = csrf.generate_csrf_tokens()
    response = JSONResponse({"token": token})
    csrf.set_csrf_cookie(signed, response)
    return response


@app.post("/form")
async def post(request: Request, csrf: CsrfProtect = Depends()):
    await csrf.validate_csrf(request)
    return "accepted"


def talk(client):
    token = client.get("/form").json()["token"]
    return [client.post("/form", headers={"X-CSRF-Token": token}).json()]


REQUESTS = ["POST /form"]
