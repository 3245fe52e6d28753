"""The file of `ingress run serve.yaml`, which is the file of Ray's `serve deploy`.

    reading    YAML text as a tree whose values have a line and a column; start here
    models     the options of the file
    checking   the tree as models; a mistake is a line with its place
    loading    the applications, imported and with the file's options
    difference two versions of a file: what is changed in place, and what needs new processes
    origins    the effective values, and where each comes from

It imports `declaration` and the folders below it, and starts nothing.
"""
