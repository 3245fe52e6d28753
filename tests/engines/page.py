"""docs/compatibility.md, made from docs/compatibility.json.

python -m tests.engines.page    make it again without running anything
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from ingress._unsupported import NAMES, OLDER
from tests.engines.audit import audit
from tests.engines.scenarios.examples import NO_APPLICATIONS
from tests.engines.suite import FEATURES, Scenario, scenarios
from tests.engines.verdicts import RESULTS, ROOT, Comparison, Results, Verdict, compare

PAGE = ROOT / "docs" / "compatibility.md"

HEAD = """\
# Compatibility with Ray Serve

`make test-ray` runs the same scenarios three times: in one process (*local*), on a Ray cluster by
`engine="ray"` (*ray*), and as Ray Serve's own application, with `from ray import serve` instead of
`import ingress as serve`. The last is what the first two are compared with. Every flag is set, so
defaults are not compared: those are in [deviations.md](deviations.md), with more reasons.

- **same**: a client observes the same results, errors, status codes, headers, placement, batches.
- **on purpose**: it does not, and should not.
- **not supported**: it is missing.

Ray {ray}, Python {python}, {date}, {minutes} minutes for all. {counts}
"""
API_HEAD = """\
## The API

Every public name of `ray.serve` {ray} with its parameters, every deployment option, and every
parameter and attribute that is not the same; `python -m tests.engines.audit` prints all of them.
{counts} Using what is absent says what the last column says. A function that
is "same" may still refuse some of Ray's parameters; each of them has a row of its own.
"""


def page(results: Results) -> str:
    """Return the text of the page."""
    known = scenarios()
    compared = [each for each in compare(known, results.observations) if _is_judged(each)]
    parts = [
        HEAD.format(
            ray=results.ray,
            python=results.python,
            date=results.date,
            minutes=max(1, round(results.took_s / 60)),
            counts=_counts(compared),
        )
    ]
    ordered = sorted(known, key=lambda each: FEATURES.index(each.feature))
    for feature, members in groupby(ordered, lambda each: each.feature):
        parts.append(_table(feature, list(members), compared))
    not_run = "\n".join(f"- `{name}.py` {why}." for name, why in NO_APPLICATIONS.items())
    parts += [f"Not run on both engines:\n\n{not_run}\n", _api(results)]
    return "\n".join(parts)


def _is_judged(each: Comparison) -> bool:
    return each.column != each.scenario.oracle or each.scenario.oracle != "native"


def _counts(compared: list[Comparison]) -> str:
    names = {each.scenario.name for each in compared}
    lines = []
    for column in ("local", "ray"):
        found = Counter(each.verdict for each in compared if each.column == column)
        listed = ", ".join(f"{found[verdict]} {verdict}" for verdict in Verdict if found[verdict])
        lines.append(f"- *{column}*: {listed}")
    return f"{len(names)} scenarios, at one or both values of the flag:\n\n" + "\n".join(lines)


def _table(feature: str, members: list[Scenario], compared: list[Comparison]) -> str:
    lines = [f"## {feature}", "", "| scenario | local | ray | why |", "|---|---|---|---|"]
    for scenario in members:
        found = [each for each in compared if each.scenario is scenario]
        cells = [_cell([each for each in found if each.column == c]) for c in ("local", "ray")]
        lines.append(f"| {_name(scenario)} | {' | '.join(cells)} | {_why(scenario)} |")
    return "\n".join(lines) + "\n"


def _name(scenario: Scenario) -> str:
    name = f"[{scenario.name}](../app_examples/{scenario.name})" if ".py" in scenario.name else ""
    native = "" if "native" in scenario.columns or name else " *(ours alone)*"
    return (name or scenario.sentence) + native


def _cell(found: list[Comparison]) -> str:
    verdicts = {each.flag: each.verdict.value for each in found}
    if not verdicts:
        return ""
    if len({*verdicts.values()}) == 1 and len(verdicts) == len(found[0].scenario.flags):
        only = f", flag {found[0].flag} only" if len(verdicts) == 1 else ""
        return verdicts[found[0].flag] + (only if found[0].scenario.feature != "Examples" else "")
    return "; ".join(f"{flag}: {verdict}" for flag, verdict in verdicts.items())


def _why(scenario: Scenario) -> str:
    return "; ".join(dict.fromkeys(each.because for each in scenario.deviations))


def _api(results: Results) -> str:
    judged = audit(results.api)
    found = Counter(each["verdict"] for each in judged)
    counts = ", ".join(f"{number} {verdict}" for verdict, number in found.items()) + "."
    names = [e for e in judged if e["name"].startswith("serve.") and e["kind"] != "parameter"]
    options = [each for each in judged if each["name"].startswith("serve.deployment(")]
    others = [each for each in judged if each not in names and each not in options]
    rest = [each for each in others if each["verdict"] != "same" or "because" in each]
    same = ", ".join(f"`{each['name']}`" for each in others if each not in rest)
    known = {each["name"].removeprefix("serve.") for each in names}
    lines = [
        API_HEAD.format(ray=results.ray, counts=f"Of {len(judged)}: {counts}"),
        "| name | | what to do, what there is more, or is refused |\n|---|---|---|",
        *map(_line, names),
        "",
        "| deployment option | in Ray by default | here | | why |\n|---|---|---|---|---|",
        *map(_option, options),
        "",
        "| parameter or attribute | | what to do, or what there is more |\n|---|---|---|",
        *map(_line, rest),
        "",
        "| module that is imported by itself, name of an older version | what to do |\n|---|---|",
        *(f"| `serve.{name}` | {NAMES[name]} |" for name in sorted(NAMES) if name not in known),
        *(f"| `{name}` | {OLDER[name]} |" for name in sorted(OLDER)),
        f"\nThe same: {same}.\n",
    ]
    return "\n".join(lines)


def _line(each: dict[str, str]) -> str:
    words = f"`{each['name']}{each.get('signature', '')}`"
    return f"| {words} | {each['verdict']} | {each.get('because', '')} |"


def _option(each: dict[str, str]) -> str:
    name = each["name"].removeprefix("serve.deployment(").removesuffix(")")
    defaults = " | ".join(f"`{each[k]}`" if k in each else "" for k in ("default", "ours"))
    return f"| `{name}` | {defaults} | {each['verdict']} | {each.get('because', '')} |"


if __name__ == "__main__":
    PAGE.write_text(page(Results.read(RESULTS)))
    print(f"written: {PAGE.relative_to(ROOT)}")
