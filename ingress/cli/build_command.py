"""`ingress build`: a file for `ingress run`, for Ray's `serve deploy`, or for KubeRay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from ingress.app.declaration.build import build
from ingress.app.declaration.names import check_names
from ingress.cli.run import read_settings
from ingress.cli.target import AppDir, load, refusal, refusing
from ingress.cli.terminal import OutputOption, write
from ingress.engines.ray.config_file import EVERY_ADDRESS, config_of, header
from ingress.engines.ray.kuberay import IMAGE, manifest, text_of
from ingress.exceptions import RayServeException


def build_command(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="MODULE:APP...", help="The bound applications, such as main:hello."),
    ],
    output: OutputOption = None,
    app_dir: AppDir = Path("."),
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the application.  [default: default; app1, app2 ... for several]",
            show_default=False,
        ),
    ] = None,
    route_prefix: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Path under which it is served.  [default: /; of several, their names]",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address of the proxies.  [default: 127.0.0.1; with --kuberay 0.0.0.0]",
            show_default=False,
        ),
    ] = None,
    working_dir: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Zip file with the application's modules, which a cluster's nodes download.",
            show_default=False,
        ),
    ] = None,
    kuberay: Annotated[
        bool, typer.Option("--kuberay", help="Write a RayService manifest for KubeRay.")
    ] = False,
    image: Annotated[str, typer.Option(help="Image of the pods of --kuberay.")] = IMAGE,
) -> None:
    """Write a file for `ingress run`, and for Ray's `serve deploy` and KubeRay.

    [dim]ingress build main:hello > serve.yaml[/dim]
    [dim]ingress build main:hello --kuberay --image registry/shop:1 > shop.yaml[/dim]

    The file names the applications and does not contain them: a cluster must be able to
    import their modules, and ingress. Nothing is started, and Ray need not be installed.
    """
    if len(targets) > 1 and (name or route_prefix):
        raise refusal("--name and --route-prefix are for one application; edit the file of several")
    several = [f"app{number + 1}" for number in range(len(targets))]
    names = several if len(targets) > 1 else [name or "default"]
    with refusing(TypeError, ValueError, RayServeException):
        check_names(names[0], route_prefix)
        built = {
            target: build(load(target, app_dir), each, acts_on_all=True)
            for target, each in zip(targets, names, strict=True)
        }
        config = config_of(
            built,
            read_settings(),
            route_prefix=route_prefix,
            host=host or (EVERY_ADDRESS if kuberay else None),
            working_dir=working_dir,
        )
        text = (
            text_of(manifest(list(built.values()), config, image), targets)
            if kuberay
            else header(config, targets) + yaml.safe_dump(config, sort_keys=False)
        )
    write(output, text)
