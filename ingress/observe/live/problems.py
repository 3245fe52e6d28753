"""The problems of a server, in words.

Each problem is "bad" or "warn", and names its application and deployment; the texts are for people.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from time import time

from ingress.observe.live.documents import (
    ApplicationView,
    DeploymentView,
    Problem,
    ReplicaNow,
    StallOfLoop,
)

BAD = ("DEPLOY_FAILED", "UNHEALTHY")
SILENT = "does not answer"
STALLED_S = 60.0
FAILING = 0.05  # share of failed requests that is bad


def all_healthy(applications: Iterable[str], deployments: Iterable[str]) -> bool:
    """Return whether these statuses are those of a healthy server."""
    runs = all(each == "RUNNING" for each in applications)
    return runs and not any(each in BAD for each in deployments)


def _problem(level: str, application: str, deployment: str, text: str) -> Problem:
    return {"level": level, "application": application, "deployment": deployment, "text": text}


def problems_of(
    absent: Mapping[int, str],
    applications: Sequence[ApplicationView],
    replicas: Sequence[ReplicaNow],
) -> list[Problem]:
    """Return the problems in words, the gravest first."""
    found = [_problem("bad", "", "", f"worker {pid} {reason}") for pid, reason in absent.items()]
    for application in applications:
        name, status = application["name"], application["status"]
        own = [each for each in replicas if each["application"] == name]
        words = []
        for each in application["deployments"]:
            mine = [one for one in own if one["deployment"] == each["name"]]
            words += [
                _problem(level, name, each["name"], text) for level, text in _words(each, mine)
            ]
        if status != "RUNNING" and not any(each["level"] == "bad" for each in words):
            text = application["message"] or f"it is {status}"
            words.append(_problem("bad" if status in BAD else "warn", name, "", text))
        found += words
    return sorted(found, key=lambda each: each["level"])


def _words(deployment: DeploymentView, replicas: Sequence[ReplicaNow]) -> list[tuple[str, str]]:
    """Return the level and the text of each problem of one deployment."""
    found: list[tuple[str, str]] = []
    status, message = deployment["status"], deployment["message"]
    if status in BAD or message:
        found.append(("bad" if status in BAD else "warn", message or f"it is {status}"))
    for each in replicas:
        found += [("bad", text) for text in _standing(each)]
    found += [("warn", text) for text in _stalled(replicas)]
    if deployment["queued"]:
        waits = _count(deployment["queued"], "request waits", "requests wait")
        running = deployment["replica_states"].get("RUNNING", 0)
        slots = _count(deployment["slots"], "slot", "slots")
        of = _count(running, "replica", "replicas")
        found.append(
            ("warn", f"{waits} for a slot; {deployment['ongoing']} run in {slots} of {of}")
        )
    if deployment["errors"]:
        share = deployment["errors"] / max(deployment["rate"], deployment["errors"])
        level = "bad" if share >= FAILING else "warn"
        found.append((level, f"{share:.1%} of its requests failed in the last minute"))
    if deployment["orphans"]:
        runs = _count(deployment["orphans"], "call runs", "calls run")
        found.append(("warn", f"{runs} on although the client has left or the deadline has passed"))
    return found


def _standing(replica: ReplicaNow) -> list[str]:
    name = f"{replica['deployment']}#{replica['replica']}"
    stands_ms = replica["loop"]["stands_ms"]
    if stands_ms and all(each["is_over"] for each in replica["stalls"]):
        process = f" in process {replica['pid']}" if replica["pid"] else ""
        return [f"the event loop of {name}{process} stands for {stands_ms / 1e3:.1f} s now"]
    return [
        f"the event loop of {name} stands for {each['ms'] / 1e3:.1f} s now{_at(each)}"
        for each in replica["stalls"]
        if not each["is_over"]
    ]


def _stalled(replicas: Sequence[ReplicaNow]) -> list[str]:
    now = time()
    recent = [
        stall
        for each in replicas
        for stall in each["stalls"]
        if stall["is_over"] and now - stall["at"] < STALLED_S
    ]
    if not recent:
        return []
    longest = max(recent, key=lambda each: each["ms"])
    times = "once" if len(recent) == 1 else f"{len(recent)} times or more"
    text = f"an event loop stalled {times} in the last minute, for up to"
    return [f"{text} {longest['ms']:.0f} ms{_at(longest)}"]


def _at(stall: StallOfLoop) -> str:
    line = stall["line"]
    if line is None:
        return ""
    source = f": {line['source']}" if line["source"] else ""
    if stall["reason"] == "gil":
        return f", waiting for the GIL while {', '.join(stall['holders'][:2])} ran"
    method = f" in {stall['method']}" if stall["method"] else ""
    return f", at {os.path.basename(line['file'])}:{line['line']}{method}{source}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
