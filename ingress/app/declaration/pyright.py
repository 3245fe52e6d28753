"""The types of `pyright.pyi`, which no code needs: import-linter does not see stubs."""
