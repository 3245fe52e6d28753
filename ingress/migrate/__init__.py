"""`ingress migrate`: code for Ray Serve, rewritten for ingress.

    files       the files of the arguments; reading and writing them
    rewriting   one file: its imports and dotted names, and what is left to do by hand
    imports     the statement in the place of one `from ... import`
    hidden      the uses of a name that are not the name
    bindings    the names of a file that mean Ray, by scope
    keywords    the options of a call that have no effect here
    advice      the counterparts of Ray Serve's names, and the sentences for names without one

Only the command line imports it. The files are parsed, never imported.
"""
