"""The views of a running server, for `ingress status`, `ingress top` and the page.

    history     the rates and latencies of the last minutes, and the growth of the memory
    view        the state of all processes with the rates, as one JSON object
    problems    the problems of a server, in words
    observer    asks the processes, which answer about themselves, makes views, and logs problems
    page        the page, and the data that it asks for

A process is read from outside, when an operator asks. Only the observer looks by itself, every 2 s.
"""
