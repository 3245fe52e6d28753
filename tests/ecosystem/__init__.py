"""Packages that users of FastAPI install: each small app answers here as on plain FastAPI.

apps/            one app for each package, written as functions
as_class         the same app as a class
serving          serves one form of an app, and makes its requests
test_packages    compares the forms: make test-ecosystem
document         writes docs/ecosystem.md
"""
