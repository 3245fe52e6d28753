"""The control plane: it makes the running replicas match the deployed applications.

    controller   starts, checks, replaces and stops replicas; start here
    factories    the seam for observers: what the parts of an application are made with

It imports `replicas` and the folders below it. Health, scaling, updates and the config file belong
here.
"""
