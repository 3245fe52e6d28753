"""The costs of jobs: `python -m benchmarks.jobs`.

fsync    4 KiB written and synced to the disk of the file, one after another: what a commit costs
enqueue  by 1, 8 and 64 tasks of one process, each of which awaits its commit
end      of a job that does nothing, one at a time: from before its enqueue until its end is written

The disk sets the first two: a host with a cache answers a sync in less time than a disk takes.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from statistics import quantiles
from time import perf_counter

from rich.console import Console

import ingress as serve
from ingress.schema import SQLiteAdapterConfig, TaskProcessorAdapter, TaskProcessorConfig
from ingress.task_consumer import instantiate_adapter_from_config, task_consumer, task_handler

TASKS = (1, 8, 64)


def syncs_per_s(folder: Path, seconds: float) -> float:
    descriptor, count = os.open(folder / "sync", os.O_CREAT | os.O_WRONLY), 0
    until = perf_counter() + seconds
    while perf_counter() < until:
        os.pwrite(descriptor, os.urandom(4096), 0)
        os.fdatasync(descriptor)
        count += 1
    os.close(descriptor)
    return count / seconds


async def enqueues_per_s(adapter: TaskProcessorAdapter, tasks: int, seconds: float) -> float:
    until = perf_counter() + seconds

    async def enqueue() -> int:
        count = 0
        while perf_counter() < until:
            await adapter.enqueue_task_async("nothing", countdown=86400)
            count += 1
        return count

    return sum(await asyncio.gather(*(enqueue() for _ in range(tasks)))) / seconds


async def ends_ms(adapter: TaskProcessorAdapter, number: int) -> list[float]:
    found = []
    for _ in range(number):
        began = perf_counter()
        job = await adapter.enqueue_task_async("nothing")
        while job.status != "SUCCESS":
            job = await adapter.get_task_status_async(job.id)
        found.append((perf_counter() - began) * 1e3)
    return found


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each rate")
    parser.add_argument("--jobs", type=int, default=500, help="whose ends are measured")
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        options = SQLiteAdapterConfig(path=str(folder / "jobs.db"))
        config = TaskProcessorConfig(queue_name="benchmark", adapter_config=options)

        class Worker:
            @task_handler
            async def nothing(self) -> None: ...

        adapter = instantiate_adapter_from_config(config)
        for run in range(given.runs):
            line = f"run {run + 1}: fsync {syncs_per_s(folder, given.seconds):,.0f}/s; enqueue"
            for tasks in TASKS:
                rate = asyncio.run(enqueues_per_s(adapter, tasks, given.seconds))
                line += f" by {tasks} {rate:,.0f}/s,"
            console.print(line.removesuffix(","))
        consumer = task_consumer(task_processor_config=config)(Worker)
        serve.run(serve.deployment(consumer).bind(), route_prefix=None)
        asyncio.run(ends_ms(adapter, 20))
        for run in range(given.runs):
            cuts = quantiles(asyncio.run(ends_ms(adapter, given.jobs)), n=100)
            console.print(
                f"run {run + 1}: end of a job p50 {cuts[49]:.1f} ms, p99 {cuts[98]:.1f} ms"
            )
        serve.shutdown()


if __name__ == "__main__":
    main()
