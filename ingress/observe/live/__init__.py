"""The present state of a running server, for `ingress status`, `ingress top` and the page.

    running     each replica: its loop, lanes, threads and process, and the calls on each
    children    the same in the child processes of replicas, which they tell
    counts      how many calls of each route have ended, and how long they took
    history     the rates and latencies of the last minutes, from those counts
    documents   the keys of the JSON that these hand on
    part        all of this in one process
    view        the parts of all processes together, as one JSON object

All of it is read from outside, when an operator asks. Only the observer looks by itself, every 2 s.
"""
