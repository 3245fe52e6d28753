"""The differences between two versions of a file, by what they need.

`for_new_processes`   http_options, logging_config, env_vars, working_dir, import_path, args,
                      code
`Difference.options`  options of deployments that are changed while their replicas run
`Difference.again`    other options of a deployment: its application is run again
`added`, `removed`    applications
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ingress.app.config_file.loading import ConfigFile, Loaded, stamp_of
from ingress.app.declaration.build import build
from ingress.config import DeploymentConfig

OptionsByDeployment = dict[str, dict[str, dict[str, object]]]
"""Options by application and deployment."""


@dataclass(slots=True)
class Difference:
    """The changes that lead a process from the old version to the new one."""

    options: OptionsByDeployment = field(default_factory=dict)
    again: list[Loaded] = field(default_factory=list)
    added: list[Loaded] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)


def for_new_processes(old: ConfigFile, new: ConfigFile) -> list[str]:
    """Return what differs and belongs to the whole process. Raises `ValueError` for conflicts."""
    whole = {
        "http_options": (old.config.http_options, new.config.http_options),
        "logging_config": (old.config.logging_config, new.config.logging_config),
        "env_vars": (old.environment(), new.environment()),
        "working_dir": (old.folder(), new.folder()),
    }
    found = [name for name, (before, after) in whole.items() if before != after]
    before_by_name = {each.name: each for each in old.config.applications}
    for each in new.config.applications:
        earlier = before_by_name.get(each.name, each)
        found += [
            f"{option} of application {each.name!r}"
            for option in ("import_path", "args")
            if getattr(earlier, option) != getattr(each, option)
        ]
    return found


def differences(
    before: Sequence[Loaded], after: Sequence[Loaded], in_place: frozenset[str]
) -> Difference:
    """Return the differences of applications. `in_place` are the options that need no replicas."""
    found = Difference()
    old = {each.config.name: each for each in before}
    new = {each.config.name: each for each in after}
    found.removed = [name for name in old if name not in new]
    for name, each in new.items():
        if (earlier := old.get(name)) is None:
            found.added.append(each)
            continue
        options = _changed(_configs(earlier), _configs(each))
        changed = {option for given in options.values() for option in given}
        if changed - in_place or earlier.config.route_prefix != each.config.route_prefix:
            found.again.append(each)
        elif options:
            found.options[name] = options
    return found


def changed_names(old: ConfigFile, new: ConfigFile) -> dict[str, dict[str, set[str]]]:
    """Return the options that the text of two versions gives other values, or gives once only."""
    found: dict[str, dict[str, set[str]]] = {}
    before, after = _given(old), _given(new)
    for name, deployment in before.keys() | after.keys():
        one, other = before.get((name, deployment), {}), after.get((name, deployment), {})
        found.setdefault(name, {})[deployment] = {
            option
            for option in one.keys() | other.keys()
            if one.get(option, ...) != other.get(option, ...)
        }
    return found


def _given(file: ConfigFile) -> dict[tuple[str, str], dict[str, object]]:
    """Return the options of the file, by application and deployment."""
    return {
        (each.name, one.name): one.overriding()
        for each in file.config.applications
        for one in each.deployments
    }


def _configs(loaded: Loaded) -> dict[str, DeploymentConfig]:
    built = build(loaded.application, loaded.config.name, acts_on_all=True)
    return {each.name: each.deployment.config for each in built.deployments}


def _changed(
    before: Mapping[str, DeploymentConfig], after: Mapping[str, DeploymentConfig]
) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for name, config in after.items():
        earlier = before.get(name)
        for option in DeploymentConfig.model_fields:
            value = getattr(config, option)
            if option == "num_replicas" and value != "auto" and config.autoscaling is not None:
                continue  # a number beside autoscaling_config would be refused
            if earlier is None or getattr(earlier, option) != value:
                found.setdefault(name, {})[option] = value
    return found


class CodeFiles:
    """The modules that the applications have imported from these folders, and their times.

    A module that has changed since is not imported again: only a new process has its new code.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [each.resolve() for each in folders]
        self._stamps = {path: stamp_of(path) for path in self._paths()}

    def changed(self) -> list[str]:
        """Return the names of the files that have changed, sorted."""
        return sorted(path.name for path, each in self._stamps.items() if stamp_of(path) != each)

    def _paths(self) -> set[Path]:
        names = [getattr(each, "__file__", None) for each in list(sys.modules.values())]
        paths = {Path(each) for each in names if isinstance(each, str)}
        found = {each for each in paths if any(map(each.is_relative_to, self._folders))}
        return {each for each in found if "site-packages" not in each.parts}
