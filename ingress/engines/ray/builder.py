"""The application builder that Ray's `serve deploy` and `serve run` import.

The files of `ingress build` name it.
"""

from __future__ import annotations

from typing import Any

from ray import serve as ray_serve

from ingress.app.declaration.build import build as flatten
from ingress.app.declaration.module_app import load
from ingress.core.base.settings import Settings
from ingress.engines.ray.application import Lowering, application_for_ray
from ingress.engines.ray.lowering import environment_for_workers


def build(args: dict[str, Any]) -> ray_serve.Application:
    """Return the application that `args["target"]`, such as "main:hello", names.

    The flags come from the environment that Ray gives the application.
    """
    built = flatten(load(str(args["target"])), str(args.get("name", "default")), acts_on_all=True)
    timeout_s = args.get("request_timeout_s")
    environment = environment_for_workers(Settings.from_environment())
    return application_for_ray(built, Lowering(environment, request_timeout_s=timeout_s))
