from authx import AuthX, AuthXConfig
from fastapi import Depends, FastAPI

PACKAGE = "authx"
auth = AuthX(
    config=AuthXConfig(
        JWT_ALGORITHM="HS256", JWT_SECRET_KEY="s" * 32, JWT_TOKEN_LOCATION=["headers"]
    )
)
app = FastAPI()
auth.handle_errors(app)


@app.get("/login")
def login():
    return {"token": auth.create_access_token("me")}


@app.get("/protected", dependencies=[Depends(auth.access_token_required)])
def protected():
    return "protected"


def talk(client):
    token = client.get("/login").json()["token"]
    headers = {"Authorization": f"Bearer {token}"}
    return [client.get("/protected", headers=headers).json() for _ in range(4)]


REQUESTS = ["GET /protected"]
