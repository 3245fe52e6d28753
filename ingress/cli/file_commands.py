"""The commands for the file of `ingress run`.

ingress build   writes one, also for Ray's `serve deploy` and for KubeRay
ingress config  prints the effective values of one, their origins, and the file's JSON Schema
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from typer.main import get_command

from ingress.app.config_file.models import ServeConfig, written
from ingress.app.config_file.origins import Effective, effective, nested
from ingress.app.declaration.build import build
from ingress.app.declaration.names import check_names
from ingress.cli.run_command import prepare, print_unused, run
from ingress.cli.run_options import HTTP, RunOptions
from ingress.cli.run_server import read_settings
from ingress.cli.target import (
    AppDir,
    AsJSON,
    load,
    read_file,
    refusal,
    refusing,
    reporting_mistakes,
)
from ingress.cli.terminal import OutputOption, write
from ingress.config import HTTPOptions
from ingress.engines import local_engine
from ingress.engines.ray.config_file import (
    EVERY_ADDRESS,
    IMAGE,
    config_of,
    header,
    manifest,
    text_of,
)
from ingress.exceptions import RayServeException
from ingress.serving.http.server_options import ServerOptions


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


RUN_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}


def config(
    context: typer.Context,
    path: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The file.", show_default=False)
    ] = None,
    show_origin: Annotated[
        bool, typer.Option("--show-origin", help="A line for each value, with its origin.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of the file, for editors.")
    ] = False,
    as_json: AsJSON = False,
    app_dir: AppDir = Path("."),
) -> None:
    """Print the values that `ingress run FILE` would have, without starting anything.

    [dim]ingress config serve.yaml --show-origin --port 9000[/dim]

    Options of `ingress run` may follow. The applications are imported, because options in code
    count too. Of several origins the first wins:
    command line, file, code, environment, default.
    """
    if schema:
        typer.echo(json.dumps(ServeConfig.model_json_schema(), indent=2))
        return
    if path is None:
        raise refusal("give a file, such as serve.yaml, or --schema")
    values = _values(path, context.args, app_dir.absolute())
    if as_json:
        shown: Any = [
            {"path": written(each.where), "value": each.value, **_origin(each)} for each in values
        ]
        told = {"values": shown} if show_origin else nested(values)
        typer.echo(json.dumps(told, indent=2))
    elif show_origin:
        lines = [(f"{written(each.where)}: {json.dumps(each.value)}", each) for each in values]
        width = min(80, max(len(line) for line, _ in lines))
        for line, each in lines:
            typer.echo(f"{line:{width}}  {' '.join(_origin(each).values())}".rstrip())
    else:
        typer.echo(yaml.safe_dump(nested(values), sort_keys=False), nl=False)


def _origin(value: Effective) -> dict[str, str]:
    return {"origin": value.origin.value, "detail": value.detail}


def _values(path: Path, options: list[str], app_dir: Path) -> list[Effective]:
    app = typer.Typer()
    app.command("run")(run)
    words = [str(path), *options]
    command_line = RunOptions(**get_command(app).make_context("ingress run", words).params)
    file = read_file(path.absolute())
    print_unused(file)
    prepare(file)
    read_settings()
    engine = local_engine()
    engine.use(ServerOptions(has_own_server=False))
    with reporting_mistakes(str(path)):
        loaded = replace(file, on_cluster=True).load_all(app_dir)  # on each engine
    found = command_line.handed(HTTP)
    with refusing(ValueError):
        HTTPOptions(**found)
    return list(
        effective(
            file,
            loaded,
            from_code=engine.http.options,
            command_line=found,
            log_level=command_line.log_level,
        )
    )
