"""Durable jobs: the embedded store, the consumers that run its jobs, and the adapter for Celery.

    enqueue -> EmbeddedAdapter -> Store: one thread, one SQLite file -> the commit is on the disk
    Consumer: claims as many jobs as there are free slots -> handle.remote() -> their outcomes

A job is a call by handle, made by a consumer in the server's process: slots, deadlines, places,
traces and drains are those of every call. Nothing here is imported unless a program names it.
"""
