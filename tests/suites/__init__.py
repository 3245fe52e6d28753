"""FastAPI's own tests, plain and on deployments: make test-fastapi-suite.

sdist             the project, and its source distribution, which has the tests
through_ingress   a pytest plugin, which serves each app of a test as a deployment
differences       fastapi.toml: the tests that fail there, with reasons
__main__          runs the tests both ways, and prints the counts and every difference
"""
