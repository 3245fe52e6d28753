from ariadne import QueryType, gql, make_executable_schema
from ariadne.asgi import GraphQL
from fastapi import FastAPI

PACKAGE = "ariadne"
query = QueryType()


@query.field("hello")
def resolve_hello(*_):
    return "hello"


schema = make_executable_schema(gql("type Query { hello: String! }"), query)
app = FastAPI()
app.mount("/graphql/", GraphQL(schema))


@app.get("/")
def root():
    return "root"


REQUESTS = ["GET /", ("POST /graphql/", {"json": {"query": "{ hello }"}})]
