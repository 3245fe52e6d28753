import strawberry
from fastapi import Depends, FastAPI
from strawberry.fastapi import GraphQLRouter

PACKAGE = "strawberry-graphql"


@strawberry.type
class Query:
    @strawberry.field
    def hello(self, info: strawberry.Info) -> str:
        return f"hello {info.context['name']}"


def name_of(name: str = "you"):
    return name


async def context(name: str = Depends(name_of)):
    return {"name": name}


app = FastAPI()
app.include_router(
    GraphQLRouter(strawberry.Schema(Query), context_getter=context), prefix="/graphql"
)


@app.get("/")
def root():
    return "root"


REQUESTS = [
    "GET /", ("POST /graphql", {"json": {"query": "{ hello }"}}),
    ("POST /graphql?name=me", {"json": {"query": "{ hello }"}}),
    ("POST /graphql", {"json": {"query": "{ nothing }"}}),
]  # fmt: skip
