from typing import Annotated

from fastapi import FastAPI, File, Form, UploadFile

PACKAGE = "python-multipart"
app = FastAPI()


@app.post("/form")
async def form(name: Annotated[str, Form()], n: Annotated[int, Form()] = 1):
    return [name, n]


@app.post("/files")
def files(first: UploadFile, others: Annotated[list[bytes], File()] = ()):
    return [first.filename, first.file.read().decode(), [len(each) for each in others]]


REQUESTS = [
    ("POST /form", {"data": {"name": "a", "n": "2"}}),
    ("POST /form", {"data": {"n": "x"}}),
    (
        "POST /files",
        {"files": [("first", ("a.txt", b"text")), ("others", b"xy"), ("others", b"z")]},
    ),
]
