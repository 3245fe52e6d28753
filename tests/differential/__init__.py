"""Random applications, each rendered twice: as plain FastAPI and as a class on ingress.

    programs   the generator: a seed -> a `Program`, rendered as plain functions or as a class
    asking     the requests of a program, and their answers, on any client
    plain      a process without ingress that answers for the plain renderings
    compare    both answers of each program, and the differences that are not listed

`make test-differential COUNT=20000` runs them at all combinations of the flags.
"""
