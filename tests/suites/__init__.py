"""The own tests of FastAPI and Starlette, plain and on deployments: make test-fastapi-suite.

sdist             the projects, and their source distributions, which have the tests
through_ingress   a pytest plugin, which serves each app of a test as a deployment
differences       fastapi.toml and starlette.toml: the tests that fail there, with reasons
__main__          runs the tests both ways, and prints the counts and every difference
"""
