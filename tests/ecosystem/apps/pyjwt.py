import jwt
from fastapi import Depends, FastAPI, HTTPException
from fastapi.security import OAuth2PasswordBearer, OAuth2PasswordRequestForm

PACKAGE = "PyJWT"
KEY = "s" * 32
scheme = OAuth2PasswordBearer(tokenUrl="token")
app = FastAPI()


def user_of(token: str = Depends(scheme)):
    try:
        return jwt.decode(token, KEY, algorithms=["HS256"])["sub"]
    except jwt.InvalidTokenError:
        raise HTTPException(401) from None


@app.post("/token")
async def login(form: OAuth2PasswordRequestForm = Depends()):
    return {"access_token": jwt.encode({"sub": form.username}, KEY, algorithm="HS256")}


@app.get("/me")
async def me(user: str = Depends(user_of)):
    return user


def talk(client):
    form = {"username": "me", "password": "x"}
    token = client.post("/token", data=form).json()["access_token"]
    return [client.get("/me", headers={"Authorization": f"Bearer {token}"}).json()]


REQUESTS = ["GET /me", ("GET /me", {"headers": {"Authorization": "Bearer x"}}), "POST /token"]
