"""The control plane: it makes the running replicas match the deployed applications.

    plan         the decision about replicas, a pure function; start here
    reconciler   the loop that looks at replicas, decides, and starts, replaces, drains, stops them
    health       the facts about replicas: checks, loops, orphans
    changes      options that change while a deployment runs; `LocalEngine.change` is its door
    controller   starts and stops applications
    running      applications and deployments that run; `status` reads them
    factories    the seam for observers: what the parts of an application are made with

It imports `replicas` and the folders below it. Whatever decides what should run, such as scaling or
a config file, changes what a deployment desires (`RunningDeployment.desire`) and has no loop.
"""
