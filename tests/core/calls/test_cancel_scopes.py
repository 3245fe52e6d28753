"""`OnceScope`: a cancellation is delivered once, and counted where it was requested."""

from __future__ import annotations

import asyncio

import anyio

from ingress.core.calls.compat import OnceScope


def test_a_cancellation_by_anyio_in_a_child_leaves_its_parents_count_alone() -> None:
    """The child leaves its own scope in the loop iteration that cancels its parent."""

    async def main() -> int:
        is_in_shield, may_leave = asyncio.Event(), asyncio.Event()

        async def child() -> None:
            with OnceScope(), anyio.CancelScope() as own:
                own.cancel()
                try:
                    await anyio.sleep_forever()
                finally:
                    with anyio.CancelScope(shield=True):
                        is_in_shield.set()
                        await may_leave.wait()

        counts = []

        async def parent() -> None:
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(child)
                    await anyio.sleep_forever()
            finally:
                task = asyncio.current_task()
                assert task is not None
                counts.append(task.cancelling())

        task = asyncio.create_task(parent())
        await is_in_shield.wait()
        task.cancel()
        may_leave.set()
        await asyncio.wait([task])
        assert task.cancelled()
        return counts[0]

    assert asyncio.run(main()) == 1
