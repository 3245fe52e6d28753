"""The problems of a server, in words.

Each problem is "bad" or "warn", and names its application and deployment; the texts are for people.
A deployment with a bad one is in a state of its own, which `serve.status()` does not have:

    HELD      calls wait, and none of those in the slots ends
    STALLED   an event loop does not turn
    FAILING   calls fail

Calls that their callers cancel, such as streams that a client stops reading, are no failures: they
count neither among the failed nor among the others.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ingress.observe.live.history import ProcessMemory
from ingress.observe.live.view import (
    ApplicationView,
    DeploymentView,
    Problem,
    ReplicaOfServer,
    View,
)
from ingress.state.running import Line, StallOfLoop, StallReason, StallsIn, StallsOfLine

BAD = ("DEPLOY_FAILED", "UNHEALTHY")
LOGGED = frozenset(("errors", "held", "memory", "queue", "replica"))
"""The kinds of problems that the observer logs; the others have a log record already."""
FAILING = 0.05  # share of failed requests that is bad, or of clients that leave that is a remark
HELD_S = 3.0
"""Seconds for which all slots may be held, and no call ends, while others wait."""
USUALLY = 2.0  # times the 99th percentile, for calls that usually take longer
WORSE = 4.0  # times as many of one replica's calls fail as of the others'
LEAST = 1e-5  # calls a second: fewer are a rounding of none
FEW = 0.1  # failed calls a second of a replica that are too few to tell
MIB = 1 << 20
GROWS, GROWS_BYTES = 0.25, 64 * MIB  # in an hour
BUSY = 0.85  # share of a processor of a loop that computes

Words = tuple[str, str, str, str]
"""The kind of a problem, its level, its text, and the state that it is; "" for none."""


def all_healthy(applications: Iterable[str], deployments: Iterable[str]) -> bool:
    """Return whether these statuses are those of a healthy server."""
    runs = all(each == "RUNNING" for each in applications)
    return runs and not any(each in BAD for each in deployments)


def _problem(
    kind: str, level: str, application: str, deployment: str, text: str, state: str = ""
) -> Problem:
    return {
        "level": level,
        "kind": kind,
        "application": application,
        "deployment": deployment,
        "text": text,
        "state": state,
    }


def add_problems(view: View, absent: Mapping[int, str]) -> None:
    """Add the problems of a server to its view, and the states and the health that they say.

    `absent` has the reason for each process that did not answer, by id.
    """
    applications = view["applications"]
    problems = problems_of(absent, applications, view["replicas"], view["memory"], view["failed"])
    deployments = [(each["name"], one) for each in applications for one in each["deployments"]]
    for name, deployment in deployments:
        deployment["state"] = state_of(name, deployment, problems)
    statuses = [each["status"] for each in applications]
    view["problems"] = problems
    view["is_healthy"] = (
        bool(view["workers"])
        and all_healthy(statuses, [each["status"] for _, each in deployments])
        and all(each["level"] != "bad" for each in problems)
    )


def problems_of(
    absent: Mapping[int, str],
    applications: Sequence[ApplicationView],
    replicas: Sequence[ReplicaOfServer],
    memory: Sequence[ProcessMemory] = (),
    failed: Sequence[Mapping[str, Any]] = (),
) -> list[Problem]:
    """Return the problems in words, the gravest first. `failed` are the last calls that failed."""
    found = [
        _problem("worker", "bad", "", "", f"worker {pid} {reason}")
        for pid, reason in absent.items()
    ]
    found += [
        _problem("memory", "warn", "", "", _growing(each)) for each in memory if is_growing(each)
    ]
    for application in applications:
        name, status = application["name"], application["status"]
        own = [each for each in replicas if each["application"] == name]
        words = []
        for each in application["deployments"]:
            mine = [one for one in own if one["deployment"] == each["name"]]
            errors = [
                one
                for one in failed
                if (one["application"], one["deployment"]) == (name, each["name"])
            ]
            own_words = _words(each, mine, own, errors)
            words += [
                _problem(kind, level, name, each["name"], *rest) for kind, level, *rest in own_words
            ]
        if status != "RUNNING" and not any(each["level"] == "bad" for each in words):
            text = application["message"] or f"it is {status}"
            words.append(_problem("status", "bad" if status in BAD else "warn", name, "", text))
        found += words
    return sorted(found, key=lambda each: each["level"])


def is_growing(memory: ProcessMemory) -> bool:
    """Return whether a process would grow by a quarter, and by 64 MiB, within an hour."""
    by_hour = memory["bytes_per_h"] or 0.0
    return by_hour > max(GROWS * memory["rss_bytes"], GROWS_BYTES)


def _growing(memory: ProcessMemory) -> str:
    rss, by_hour = memory["rss_bytes"] / MIB, (memory["bytes_per_h"] or 0.0) / MIB
    return (
        f"the memory of {memory['process']} grows by {by_hour:.0f} MiB an hour, and is {rss:.0f} "
        "MiB: `ingress memory`, where the server runs, names the lines"
    )


def state_of(application: str, deployment: DeploymentView, problems: Iterable[Problem]) -> str:
    """Return the state of a deployment: that of its gravest problem, or else its status."""
    name = application, deployment["name"]
    states = [
        each["state"] for each in problems if (each["application"], each["deployment"]) == name
    ]
    return next(filter(None, states), deployment["status"])


def _words(
    deployment: DeploymentView,
    replicas: Sequence[ReplicaOfServer],
    all_replicas: Sequence[ReplicaOfServer],
    failed: Sequence[Mapping[str, Any]],
) -> list[Words]:
    """Return the words for each problem of one deployment, of the replicas of its application."""
    found: list[Words] = []
    status, message = deployment["status"], deployment["message"]
    if status in BAD or message:
        level = "bad" if status in BAD else "warn"
        found.append(("status", level, message or f"it is {status}", ""))
    for each in replicas:
        found += [("stands", "bad", text, "STALLED") for text in _standing(each)]
    found += [("stalled", "warn", text, "") for text in _stalled(replicas)]
    if is_held(deployment):
        found.append(("held", "bad", _held(deployment, replicas, all_replicas), "HELD"))
    elif waiting := _waiting(deployment):
        running = [each for each in replicas if each["state"] == "RUNNING"]
        slots = _count(deployment["slots"], "slot", "slots")
        of = _count(len(running), "replica", "replicas")
        text = f"{waiting}; {deployment['ongoing']} run in {slots} of {of}"
        if status not in BAD:  # else the advice would be about something else
            text += f". {_waits_for(replicas, all_replicas) or _advice(deployment, running)}"
        found.append(("queue", "warn", text, ""))
    found += [("replica", "bad", text, "FAILING") for text in _failing(replicas, failed)]
    share = _failed_of([deployment])
    if (percent := f"{share:.1%}") != "0.0%":
        error = _most_failed(failed)
        more = error and f", most of them with {error}"
        text = f"{percent} of its requests failed in the last minute{more}"
        level, state = ("bad", "FAILING") if share >= FAILING else ("warn", "")
        found.append(("errors", level, text, state))
    left = deployment["left"] / max(deployment["rate"], deployment["left"], LEAST)
    if left >= FAILING:
        text = f"{left:.1%} of its clients left before their answer began in the last minute"
        found.append(("left", "warn", text, ""))
    if (jobs := deployment["jobs"]) and (lost := jobs["dead"] + jobs["unreadable"]):
        text = (
            f"{_count(lost, 'job', 'jobs')} of the queue {jobs['queue']!r} "
            f"{'was' if lost == 1 else 'were'} given up; see "
            f"`ingress jobs list --queue {jobs['queue']}`"
        )
        found.append(("jobs", "warn", text, ""))
    if deployment["orphans"]:
        runs = _count(deployment["orphans"], "call runs", "calls run")
        text = f"{runs} on although the client has left or the deadline has passed"
        found.append(("orphans", "warn", text, ""))
    return found


def _failed_of(several: Sequence[DeploymentView | ReplicaOfServer]) -> float:
    """Return the share of failed calls among those that were not cancelled; 0.0 without any."""
    errors = sum(each["errors"] for each in several)
    others = sum(each["rate"] - each["cancelled"] for each in several)
    return errors / max(errors, others, LEAST)


def is_held(deployment: DeploymentView) -> bool:
    """Return whether other calls wait, or are turned away, while none of those in the slots ends.

    Calls that usually take longer than `HELD_S` have that time, and a stream alone delays no call.
    """
    usual_s = (deployment["p99"] or 0.0) / 1e3
    is_wanted = deployment["queued"] or deployment["refused"] or deployment["left"]
    return bool(is_wanted and deployment["slots"]) and deployment["held_s"] >= max(
        HELD_S, USUALLY * usual_s
    )


def _held(
    deployment: DeploymentView,
    replicas: Sequence[ReplicaOfServer],
    all_replicas: Sequence[ReplicaOfServer],
) -> str:
    """Return the words for slots whose calls do not end: their line, and the remedy."""
    slots = _count(deployment["slots"], "slot is", "slots are")
    text = f"{slots} held, and no call has ended for {deployment['held_s']:.0f} s"
    if deployment["slots"] != 1:
        text = f"all {text}"
    if (found := _most(replicas)) is not None:
        line, number, every, where = found
        text += f"; {number} of {every} calls are at {place_of(line)}"
        text += f" on the event loop of {where}" if where else ""
    if waiting := _waiting(deployment):
        text += f"; {waiting}"
    advice = _waits_for(replicas, all_replicas) or (
        "Find out what that line waits for, and give it a timeout; with a deadline "
        "(request_timeout_s) callers get an answer meanwhile"
    )
    return f"{text}. {advice}"


def _waiting(deployment: DeploymentView) -> str:
    """Return the words for the calls that wait, or are refused, for lack of a slot; "" for none."""
    words = []
    if deployment["queued"]:
        waits = _count(deployment["queued"], "request waits", "requests wait")
        words.append(f"{waits} for a slot")
    if deployment["refused"]:
        words.append(f"{deployment['refused']:.3g} requests a second are refused")
    return ", ".join(words)


def _most(
    replicas: Sequence[ReplicaOfServer],
) -> tuple[Line, int, int, str] | None:
    """Return the line that most calls are at, their number, that of all, and a replica's name.

    The name is for calls that all wait for one event loop, which stands at that line.
    """
    calls = [call for each in replicas for call in each["calls"]]
    lines = [line for call in calls if (line := call["line"]) is not None]
    if not lines:
        return None
    by_place = Counter((each["file"], each["line"]) for each in lines)
    (place, number), *_ = by_place.most_common(1)
    line = next(each for each in lines if (each["file"], each["line"]) == place)
    on_loop = [each for each in replicas if each["loop"]["runs"] and each["loop"]["stands_ms"]]
    is_one = number == 1 < len(calls) and len(on_loop) == 1
    name = f"{on_loop[0]['deployment']}#{on_loop[0]['replica']}" if is_one else ""
    return line, number, len(calls) + sum(each["more_calls"] for each in replicas), name


def _advice(deployment: DeploymentView, replicas: Sequence[ReplicaOfServer]) -> str:
    """Return what to do against the overload of a deployment, from what its calls do now."""
    loops = [each["loop"]["busy"] or 0.0 for each in replicas]
    in_threads = sum(
        len(pool["runs"]) for each in replicas for pool in (each["threads"], *each["lanes"])
    )
    awaiting = sum(call["where"] == "awaits" for each in replicas for call in each["calls"])
    found = _most(replicas)
    at = "" if found is None else f", most of them at {place_of(found[0])}"
    if sum(loops) >= BUSY and sum(loops) >= BUSY * len(loops):
        more = 'They compute: give them more cores, by isolation="process" or more workers'
    elif awaiting > in_threads:
        more = f"Its calls wait{at}: raise max_ongoing_requests, or num_replicas"
    elif in_threads:
        more = (
            f"Its calls are in threads{at}: if they wait, raise max_ongoing_requests; if "
            'they compute, num_replicas with isolation="process"'
        )
    else:
        more = "Raise num_replicas or max_ongoing_requests"
    if not deployment["is_bounded"]:
        more += "; with max_queued_requests or a deadline, callers beyond that are refused at once"
    return more


def _waits_for(replicas: Sequence[ReplicaOfServer], all_replicas: Sequence[ReplicaOfServer]) -> str:
    """Return the words for calls that wait for another deployment; "" if most of them do not.

    A call that was made in a request has its id, and is younger than the call that waits for it.
    Of a chain of calls the youngest is to blame: the others wait for it.
    """
    ages = {
        call["request_id"]: call["ms"] or 0.0
        for each in replicas
        for call in each["calls"]
        if call["where"] == "awaits" and call["request_id"]
    }
    names = {each["deployment"] for each in replicas}
    youngest: dict[str, tuple[float, str]] = {}
    for each in all_replicas:
        for call in each["calls"]:
            made_in, age = call["request_id"], call["ms"] or 0.0
            limit, _ = youngest.get(made_in, (ages.get(made_in, 0.0), ""))
            if each["deployment"] not in names and age < limit:
                youngest[made_in] = age, each["deployment"]
    calls = sum(len(each["calls"]) for each in replicas)
    others = Counter(deployment for _, deployment in youngest.values())
    if not others or 2 * max(others.values()) <= calls:
        return ""
    [(name, number)] = others.most_common(1)
    found = _most([each for each in all_replicas if each["deployment"] == name])
    at = "" if found is None else f", most of them at {place_of(found[0])}"
    return (
        f"{number} of its {calls} calls wait for {name}{at}. Look there first: more slots here "
        "would only wait too; a deadline, or a timeout around the call, frees these"
    )


def _most_failed(failed: Sequence[Mapping[str, Any]]) -> str:
    """Return the error that most of the calls that failed last have in common; "" for none."""
    if not failed:
        return ""
    by_place = Counter((each["error"], tuple(each["place"] or ())) for each in failed)
    [((error, place), _)] = by_place.most_common(1)
    at = f" at {os.path.basename(place[0])}:{place[1]}" if place else ""
    return f"{error}{at}"


def _failing(replicas: Sequence[ReplicaOfServer], failed: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the words for each replica that fails far more of its calls than the others do."""
    found = []
    for each in replicas:
        if each["errors"] < FEW:
            continue
        others = [
            one for one in replicas if one is not each and one["rate"] > one["cancelled"] + LEAST
        ]
        if not others:
            continue
        share, of_others = _failed_of([each]), _failed_of(others)
        if share >= FAILING and share > WORSE * of_others:
            name = f"{each['deployment']}#{each['replica']}"
            process = f" in process {each['pid']}" if each["pid"] else ""
            error = _most_failed([one for one in failed if one["replica"] == each["replica"]])
            found.append(
                f"{name}{process} fails {share:.0%} of its calls{error and f' with {error}'}, the "
                f"other {_count(len(others), 'replica', 'replicas')} {of_others:.1%}; a "
                "check_health that tests what its calls need would have it replaced"
            )
    return found


def _standing(replica: ReplicaOfServer) -> list[str]:
    name = f"{replica['deployment']}#{replica['replica']}"
    stands_ms = replica["loop"]["stands_ms"]
    if stands_ms and all(each["is_over"] for each in replica["stalls"]):
        process = f" in process {replica['pid']}" if replica["pid"] else ""
        return [f"the event loop of {name}{process} stands for {stands_ms / 1e3:.1f} s now"]
    return [
        _cured(f"the event loop of {name} stands for {each['ms'] / 1e3:.1f} s now{_at(each)}", each)
        for each in replica["stalls"]
        if not each["is_over"]
    ]


def _stalled(replicas: Sequence[ReplicaOfServer]) -> list[str]:
    """Return the words for the lines that have stalled event loops in the last minute.

    The line with the longest stall, and what else there was. A deployment's replicas have most
    lines in common.
    """
    by_line: dict[tuple[object, ...], list[tuple[StallsOfLine, StallsIn]]] = {}
    for each in replicas:
        for worst in each["worst"]:
            if (minute := worst["minute"]) is not None:
                line = worst["line"] or {"file": "", "line": 0}
                key = (worst["reason"], line["file"], line["line"])
                by_line.setdefault(key, []).append((worst, minute))
    if not by_line:
        return []
    longest = max(by_line.values(), key=lambda found: max(minute["ms"] for _, minute in found))
    times = sum(minute["times"] for _, minute in longest)
    waited = max(minute["waited"] for _, minute in longest)
    text = f"an event loop stalled {'once' if times == 1 else f'{times} times'} in the last minute"
    text += f", for up to {max(minute['ms'] for _, minute in longest):.0f} ms{_at(longest[0][0])}"
    if waited:
        text += f"; up to {_count(waited, 'request', 'requests')} waited"
    if len(by_line) > 1:
        text += f"; and at {_count(len(by_line) - 1, 'other line', 'other lines')}"
    return [_cured(text, longest[0][0])]


def _cured(text: str, stall: StallOfLoop) -> str:
    """Return the words for a stall with what to do about it, if its reason tells."""
    return f"{text}. {StallReason(stall['reason']).cure}".rstrip(". ")


def _at(stall: StallOfLoop) -> str:
    line = stall["line"]
    if stall["reason"] == "starved":
        return f", ready to run without a processor, as {stall['scarcity']}"
    if line is None:
        return ""
    if stall["reason"] == "gil":
        return f", waiting for the GIL while {', '.join(stall['holders'][:2])} ran"
    method = f" in {stall['method']}" if stall["method"] else ""
    return f", at {place_of(line, method)}"


def place_of(line: Line, method: str = "") -> str:
    """Return a line of code in words: its file, its number and its source."""
    source = f": {line['source']}" if line["source"] else ""
    return f"{os.path.basename(line['file'])}:{line['line']}{method}{source}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
