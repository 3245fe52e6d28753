from fastapi import BackgroundTasks, FastAPI
from fastapi_mail import ConnectionConfig, FastMail, MessageSchema, MessageType

PACKAGE = "fastapi-mail"
mail = FastMail(
    ConnectionConfig(
        MAIL_USERNAME="a", MAIL_PASSWORD="b", MAIL_FROM="a@example.com", MAIL_PORT=25,
        MAIL_SERVER="localhost", MAIL_STARTTLS=False, MAIL_SSL_TLS=False, SUPPRESS_SEND=1,
    )
)  # fmt: skip
app = FastAPI()


@app.post("/mail")
async def send(tasks: BackgroundTasks):
    message = MessageSchema(
        subject="s", recipients=["b@example.com"], body="hello", subtype=MessageType.plain
    )
    tasks.add_task(mail.send_message, message)
    with mail.record_messages() as outbox:
        await mail.send_message(message)
        return [each["subject"] for each in outbox]


REQUESTS = ["POST /mail", "POST /mail"]
