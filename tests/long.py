"""The tests that `make test` leaves to `make test-long`, because of their time: long.txt.

    python -m pytest -n 3 --junitxml=times.xml
    python -m tests.long times.xml     writes the list again, by the times of that run

A test that takes long is in the list, unless it proves what the README or a guide says, or is the
short one of its kind. Of a function with parameters one case stays, if that takes little.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

LIST = Path(__file__).with_name("long.txt")
LONG_S = 0.8
ONE_CASE_S = 1.5
PROMISES = ("readme", "guides", "tutorial", "differential", "documents", "how_to", "project")
SHORT_ONES = (
    "test_a_call_that_a_killed_child_had_begun",
    "test_a_child_that_ends_takes_its_own",
    "test_a_request_enters_no_more_functions_and_modules_than_these[async-default",
    "test_a_server_serves_it_and_stops_cleanly[ingress-run-default",
    "test_a_worker_that_is_killed_is_replaced",
    "test_each_way_to_stream",
    "test_no_server_dies_of_deadlines_and_of_clients_that_leave[111]",
    "test_nothing_is_left_of_many_responses_that_were_cut[separate1]",
    "test_the_project_passes_as_it_is_written[pytest]",
    "test_the_project_serves_by_its_file",
    "test_what_runs_is_answered_and_what_comes_later_is_refused[ingress run-separate1-patient]",
)


def listed() -> frozenset[str]:
    """Return the ids of tests, and of functions all of whose cases take long."""
    return frozenset(LIST.read_text().splitlines())


def is_listed(node_id: str, names: frozenset[str]) -> bool:
    return node_id in names or node_id.partition("[")[0] in names


def stays(node_id: str) -> bool:
    file = node_id.partition("::")[0].rpartition("/")[2]
    return file in {f"test_{each}.py" for each in PROMISES} or any(
        each in node_id for each in SHORT_ONES
    )


def chosen(times: dict[str, float]) -> list[str]:
    """Return the lines of the list. `times` are seconds by the ids of tests."""
    cases: dict[str, list[str]] = defaultdict(list)
    for node_id in times:
        cases[node_id.partition("[")[0]].append(node_id)
    lines: list[str] = []
    for function, of_function in cases.items():
        in_order = sorted(of_function, key=times.__getitem__)
        long = [each for each in in_order if times[each] >= LONG_S and not stays(each)]
        if long == in_order and len(long) > 1 and times[long[0]] < ONE_CASE_S:
            del long[0]
        lines += [function] if long and len(long) == len(in_order) else long
    return sorted(lines)


def times_of(report: Path) -> dict[str, float]:
    """Return the seconds of each test of a report of pytest, by its id."""
    times = {}
    for case in ElementTree.parse(report).iter("testcase"):  # pytest's own
        file, _, of_class = case.attrib["classname"].partition(".Test")
        name = f"Test{of_class}::{case.attrib['name']}" if of_class else case.attrib["name"]
        times[f"{file.replace('.', '/')}.py::{name}"] = float(case.attrib["time"])
    return times


if __name__ == "__main__":
    LIST.write_text("\n".join(chosen(times_of(Path(sys.argv[1])))) + "\n")
