"""`ingress config`: the effective values of a file, their origins, and the file's JSON Schema."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from typer.main import get_command

from ingress.app.config_file.checking import written
from ingress.app.config_file.models import ServeConfig
from ingress.app.config_file.origins import Effective, effective, nested
from ingress.cli.run import read_settings
from ingress.cli.run_command import run
from ingress.cli.run_file import prepare, print_unused
from ingress.cli.run_options import HTTP, RunOptions
from ingress.cli.target import AppDir, AsJSON, read_file, refusal, refusing, reporting_mistakes
from ingress.config import HTTPOptions
from ingress.engines import local_engine
from ingress.serving.http.server_options import ServerOptions

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
