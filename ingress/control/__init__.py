"""The control plane: it makes the replicas that run match what was deployed.

    controller   starts, checks, replaces and stops replicas; start here

It imports `replicas` and what is below it. Health, scaling, updates and the config file belong
here.
"""
