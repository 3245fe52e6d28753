"""docs/compatibility.md is what was observed, and this version still behaves so.

`make test-ray` observes; these tests read its record and run the scenarios again in this process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ingress
import ingress as serve
from ingress import config, context, handle, schema
from ingress._unsupported import MEMBERS, NAMES, OLDER, PARAMETERS
from ingress.config import DeploymentConfig, HTTPOptions
from tests.engines.audit import PRIVATE_OF_RAY, audit, undecided
from tests.engines.audit import main as print_audit
from tests.engines.page import PAGE, page
from tests.engines.scenarios.examples import EXAMPLES, NO_APPLICATIONS
from tests.engines.suite import FEATURES, Deviation, Scenario, scenarios
from tests.engines.verdicts import FAILURES, ROOT, Results, Verdict, compare

SCENARIOS = scenarios()
RESULTS = Results.read()
LOCAL = sorted({each.module for each in SCENARIOS} - {"examples"})
# The scenarios


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
def test_what_was_observed_is_the_same_or_declared(scenario: Scenario) -> None:
    found = list(compare([scenario], RESULTS.observations))
    wrong = [str(each) for each in found if each.verdict in FAILURES]

    assert not wrong, "\n".join(wrong)


@pytest.mark.thorough
@pytest.mark.timeout(240)
@pytest.mark.parametrize("flag", ["0", "1"])
def test_this_version_still_does_what_was_observed(flag: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.engines.column", "local", flag, str(tmp_path)]
    ran = subprocess.run(
        [*command, "--only", *LOCAL], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    observed = json.loads((tmp_path / f"local-{flag}.json").read_text())
    recorded = RESULTS.observations[f"local-{flag}"]

    assert observed == {name: recorded[name] for name in observed}


def test_the_record_has_every_scenario_and_no_other() -> None:
    names = {each.name for each in SCENARIOS}

    assert {name for observed in RESULTS.observations.values() for name in observed} == names


def test_every_feature_that_must_be_there_has_a_scenario_on_ray_serve_itself() -> None:
    compared = {each.feature for each in SCENARIOS if "native" in each.columns}

    assert {*FEATURES} - compared == {"Examples"}
    assert len(SCENARIOS) > 80 + len(EXAMPLES)


def test_every_example_is_run_on_both_engines_or_says_why_not() -> None:
    examples = {path.stem for path in (ROOT / "app_examples").glob("[a-z]*.py")}

    assert {*EXAMPLES} | {*NO_APPLICATIONS} == examples


def test_every_row_of_the_deviations_that_a_scenario_names_is_there() -> None:
    text = (ROOT / "docs" / "deviations.md").read_text()
    rows = {line.split(" | ")[0].removeprefix("| ") for line in text.splitlines()}

    assert {each.row for scenario in SCENARIOS for each in scenario.deviations if each.row} <= rows


def verdict(observed: Any, expected: Any, *deviations: Deviation) -> Verdict:
    made = Scenario("s", "f", None, lambda it: None, deviations, ("local", "native"), "0")
    found = {"local-0": {"s": observed}, "native-0": {"s": expected}}
    [local, _] = compare([made], found)
    return local.verdict


def test_a_difference_has_to_be_declared_and_a_declared_one_has_to_be_there() -> None:
    declared, missing = Deviation("why"), Deviation("why", is_supported=False)

    assert verdict(1, 1) is Verdict.SAME
    assert verdict(1, 2) is Verdict.DIFFERENT
    assert verdict(1, 2, declared) is Verdict.ON_PURPOSE
    assert verdict(1, 2, missing) is Verdict.NOT_SUPPORTED
    assert verdict(1, 1, declared) is Verdict.VANISHED
    assert verdict({"failed": "so"}, 2, declared) is Verdict.FAILED


def test_the_page_says_what_the_record_says() -> None:
    assert PAGE.read_text() == page(RESULTS), "python -m tests.engines.page"


# The API


def test_nothing_of_ray_serve_is_absent_without_a_word() -> None:
    assert list(undecided(audit(RESULTS.api))) == []


def test_a_function_that_is_the_same_names_the_parameters_that_it_refuses() -> None:
    judged = {each["name"]: each for each in audit(RESULTS.api)}
    absent = {name for name in judged if "absent" in judged[name] and name.startswith("serve.run(")}

    assert absent
    refused = judged["serve.run"]["because"].partition("refuses ")[2]
    assert {f"serve.run({each.strip('`')})" for each in refused.split(", ")} == absent


def test_the_program_prints_every_name_with_its_parameters_and_every_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["audit"])

    assert print_audit() == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.split("  ")[0] in ("same", "on purpose", "missing") for line in lines[:-1])
    assert any(line.startswith("same        serve.run(target, blocking=False,") for line in lines)
    option = "on purpose  serve.deployment(max_ongoing_requests) = 5, here 100"
    assert any(line.startswith(option) for line in lines)
    printed = "\n".join(lines)
    assert [each["name"] for each in audit(RESULTS.api) if each["name"] not in printed] == []


ABSENT = [
    each for each in audit(RESULTS.api) if "absent" in each and each["because"] != PRIVATE_OF_RAY
]


def use(kind: str, name: str) -> None:
    """Use a name of Ray Serve as a user would."""
    if kind == "parameter":
        function, _, parameter = name.removesuffix(")").partition("(")
        use_parameter(function, parameter)
        return
    owner, _, last = name.rpartition(".")
    modules: dict[str, Any] = {"serve": serve, "exceptions": serve.exceptions, "config": config}
    modules |= {"context": context, "handle": handle, "schema": schema}
    modules["autoscaling_policy"] = serve.autoscaling_policy
    if owner in modules:
        getattr(modules[owner], last)
    elif owner == "config.HTTPOptions":
        options: Any = HTTPOptions
        options(**{last: 1})
    elif owner.startswith("handle."):
        use_of_handle(owner, last)
    else:
        getattr(object_of(owner), last)


def use_parameter(function: str, parameter: str) -> None:
    serve: Any = ingress
    if function == "serve.deployment":
        config: Any = DeploymentConfig
        config(**{parameter: 1})
    elif function == "handle.options" or function in PARAMETERS:
        call: Any = {
            "handle.options": partial(serve.DeploymentHandle.options, None),
            "serve.run": partial(serve.run, None),
            "serve.run_many": partial(serve.run_many, []),
            "serve.RunTarget": partial(serve.RunTarget, None),
            "serve.start": serve.start,
        }[function]
        call(**{parameter: {}})
    else:
        getattr(serve, function.removeprefix("serve."))


def use_of_handle(owner: str, last: str) -> None:
    class Named:
        async def __call__(self) -> Any:
            yield 1

    deployed = serve.run(serve.deployment(Named).bind(), route_prefix=None)
    try:
        streaming = deployed.options(stream=owner.endswith("Generator"))
        getattr(deployed if owner.endswith("Handle") else streaming.remote(), last)
    finally:
        serve.shutdown()


def object_of(owner: str) -> Any:
    if owner == "declaration.Deployment":
        return serve.deployment(type("Named", (), {}))
    if owner == "schema.ReplicaDetails":
        return schema.ReplicaDetails("0", "RUNNING", 0, "", {})
    assert owner == "context.ReplicaContext"
    made: Any = serve.ReplicaContext
    return made(None)


@pytest.mark.parametrize("entry", ABSENT, ids=lambda each: each["name"])
def test_using_what_is_absent_says_what_to_do(entry: dict[str, str]) -> None:
    with pytest.raises((AttributeError, TypeError), match=re.escape(entry["because"])):
        use(entry["kind"], entry["name"])


def test_every_note_is_about_a_name_of_ray_serve() -> None:
    """A note about a name that Ray Serve does not have would never be shown."""
    known = {each["name"] for each in RESULTS.api}
    parameters = {f"{f}({name})" for f, names in PARAMETERS.items() for name in names}
    names = {f"serve.{name}" for name in NAMES}
    members = {
        name
        for owner, of in MEMBERS.items()
        for name in of
        if not any(each.endswith(f"{owner}.{name}") for each in known)
    }

    assert parameters <= known
    assert names <= known | {f"serve.{name}" for name in MODULES}
    assert members == set()


def test_the_page_has_every_name_with_a_note() -> None:
    text = PAGE.read_text()
    noted = {*NAMES, *OLDER, *(name for names in MEMBERS.values() for name in names)}

    assert sorted(name for name in noted if not re.search(rf"[.`]{name}\b", text)) == []


MODULES = {
    *("async_inference_autoscaling_policy", "dag", "experimental", "gradio_integrations", "llm"),
    *("scripts", "taskiq_task_processor"),
}
"""Modules of Ray Serve that users import separately: `from ray.serve.llm import ...`."""


def test_a_deployment_has_its_options_as_attributes() -> None:
    made: Any = serve.deployment(num_replicas=3, user_config={"a": 1})(type("Named", (), {}))

    assert (made.num_replicas, made.user_config, made.max_ongoing_requests) == (3, {"a": 1}, 100)
    assert not hasattr(made, "anything_else")
