"""FastAPI's own tests, on FastAPI and on deployments: make test-fastapi-suite.

sdist             FastAPI's source distribution, which has the tests
through_ingress   a pytest plugin, which serves each app of a test as a deployment
artefacts         the tests that cannot pass through a deployment, with reasons and checks
__main__          runs the tests both ways, and prints the counts and every difference
"""
