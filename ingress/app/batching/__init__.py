"""`@serve.batch`: calls that arrive one by one run together.

    batching     the decorator and its options; start here
    chooser      size and wait of batches with `target_latency_ms`
    batch_queue  when a batch forms and how it runs
    batched      the types of batched functions, for type checkers

It imports `execution`, `calls` and what is below them.
"""

from ingress.app.batching.batching import batch

__all__ = ["batch"]
