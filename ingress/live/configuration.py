"""The options in use with their origins, and the callables that the flag would move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from ingress.base.options import plain
from ingress.base.settings import SYNC_IN_THREADPOOL, Settings
from ingress.control.running import RunningApplication
from ingress.inspection.explain import rows_of

_DEFAULTS = Settings()


def configuration_of(
    applications: Iterable[RunningApplication], settings: Settings
) -> dict[str, Any]:
    """Return the configuration of running applications. It reads the users' source files."""
    applications = list(applications)
    return {
        "flag": {"name": SYNC_IN_THREADPOOL, "value": str(int(settings.run_sync_in_threadpool))},
        "moves": [move for each in applications for move in _moves(each, settings)],
        "options": [
            *(option for each in applications for option in _options(each)),
            *_settings(settings),
        ],
    }


def _moves(application: RunningApplication, settings: Settings) -> Iterator[dict[str, str]]:
    flag = int(settings.run_sync_in_threadpool)
    built = [each.built for each in list(application.deployments.values())]
    for row in rows_of(built, settings) if built else ():
        if row.moves:
            yield {
                "application": application.name,
                "deployment": row.deployment,
                "what": row.what,
                "name": row.name,
                "from": row.places[flag].where,
                "to": row.places[1 - flag].where,
            }


def _options(application: RunningApplication) -> Iterator[dict[str, Any]]:
    """Yield the options of each deployment: those that are set come first."""
    for name, deployment in list(application.deployments.items()):
        config = deployment.config
        given = config.model_fields_set
        for option in sorted(type(config).model_fields, key=lambda each: each not in given):
            yield {
                "where": f"{application.name}:{name}.{option}",
                "value": plain(getattr(config, option)),
                "origin": "code, file or command" if option in given else "default",
            }


def _settings(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield the settings of the process."""
    for each in fields(settings):
        value = getattr(settings, each.name)
        if each.name in ("http_limits", "native_threads"):
            continue
        is_set = value != getattr(_DEFAULTS, each.name)
        yield {
            "where": f"settings.{each.name}",
            "value": plain(value),
            "origin": "environment" if is_set else "default",
        }
    for name, value in settings.native_threads.items():
        yield {"where": name, "value": value, "origin": "environment"}
