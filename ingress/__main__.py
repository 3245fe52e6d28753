"""`python -m ingress`: the command line."""

from ingress.cli import main

if __name__ == "__main__":
    main()
