"""IG111: objects of one event loop that several replicas or deployments reach."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from ingress.app.declaration.build import BuiltDeployment
from ingress.app.declaration.loop_objects import LoopObject, loop_objects
from ingress.check.findings import Finding
from ingress.check.rules import RULES
from ingress.check.sources import Sources


def shared_objects(deployments: Iterable[BuiltDeployment], sources: Sources) -> Iterator[Finding]:
    """Yield the objects of one loop that would be used on several.

    A deployment whose `loop` is written has decided. Replicas in processes share no object.
    """
    found: defaultdict[LoopObject, list[BuiltDeployment]] = defaultdict(list)
    for built in deployments:
        config = built.deployment.config
        if config.loop is None and config.isolation == "thread":
            for each in loop_objects(built):
                found[each].append(built)
    for each, users in found.items():
        if sum(built.deployment.config.replica_count for built in users) == 1 or not each.line:
            continue
        names = " and ".join(built.name for built in users)
        path = Path(each.file).resolve()
        if (file := sources.files.get(path)) is not None and file.allows("IG111", each.line):
            continue
        named = f" and is named in {each.named_in}" if each.named_in else ""
        message = (
            f"{each.name} ({each.kind}) belongs to one event loop{named}, so the replicas of "
            f"{names} share a loop"
        )
        yield Finding(RULES["IG111"], path, each.line, 1, message, tuple(b.name for b in users))
