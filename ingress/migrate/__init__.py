"""`ingress migrate`: code for Ray Serve, rewritten for ingress.

    files       the files of the arguments; reading and writing them
    rewriting   one file: its imports and dotted names, and what is left to do by hand
    bindings    the names of a file that mean Ray, by scope, and their hidden uses
    advice      the counterparts of Ray Serve's names; the sentences for names without one, and for
                options without effect here

Only the command line imports it. The files are parsed, never imported.
"""
