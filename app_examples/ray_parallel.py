"""Ray tasks inside a deployment: separate processes, each with its own GIL.

    python -m pip install -e ".[ray]"
    ingress run app_examples.ray_parallel:app --engine ray

    curl http://127.0.0.1:8000/    {"results":[1,4,9,16]}

The guide's note: "While you can spawn Ray tasks from Ray Serve deployments, this approach isn't
recommended because it lacks tooling for observability and debugging." Of the guide's samples
only this one needs Ray, which it imports. `ingress` does not need it, so it runs on either engine.
"""

import asyncio

import ray

import ingress as serve


@ray.remote
def heavy_task(x):
    # Heavy compute runs in its own worker process.
    return x * x


@serve.deployment
class RayParallel:
    async def __call__(self, request):
        values = [1, 2, 3, 4]
        refs = [heavy_task.remote(v) for v in values]
        results = await asyncio.gather(*[r for r in refs])  # noqa: C416
        return {"results": results}


app = RayParallel.bind()
