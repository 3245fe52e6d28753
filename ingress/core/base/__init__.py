"""Values and small helpers that every other folder may use; independent of requests.

    settings     environment variables, read into one frozen object; start here
    options      the base class of the options in `ingress.config`
    types        identities, and the metadata of a request
    signals, standard_streams, counters,
    gc_freeze, libraries

It imports nothing of the package.
"""
