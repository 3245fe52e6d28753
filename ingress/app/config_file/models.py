"""The options of a file, with the names and defaults of Ray's `serve deploy`.

    applications                  name, route_prefix, import_path, args, runtime_env, deployments
    applications[].deployments    the options of `@serve.deployment`; they override those in code
    http_options                  `HTTPOptions`: Ray's options, and the limits of this package
    logging_config                `LoggingConfig`

Source: Ray 2.60.0, serve/schema.py. Unlike Ray, no unknown key is accepted at any level.

A mistake of a file is one line with its place:

    serve.yaml:7:9: applications[0].deployments[0].num_replica is not an option; did you mean
    num_replicas?
"""

from __future__ import annotations

import difflib
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationError, model_validator

from ingress._unsupported import NAMES
from ingress.app.config_file.reading import ConfigFileError, FileValue, Key, Position, Where
from ingress.app.declaration.cluster_options import for_a_cluster
from ingress.app.declaration.names import check_prefix
from ingress.config import DeploymentConfig, HTTPOptions, LoggingConfig, options_not_acted_on
from ingress.core.base.options import Json, Options, is_number, is_variable
from ingress.core.base.settings import ENGINE, expanded

RAY_BUILDER = "ingress.engines.ray.builder:build"
"""The `import_path` in the files of `ingress build`; `args["target"]` is the application."""

_GRPC = "there is no gRPC server here"
_ANYSCALES = "a service of Anyscale has it at the top: leave it out here."


def _import_path(value: str) -> str:
    """Check a path as Ray does: `module:name`, or `module.name`."""
    is_plain = value.isascii() and not any(each.isspace() or each == "/" for each in value)
    module, _, name = value.rpartition(":" if ":" in value else ".")
    if not is_plain or not module or not name or value.count(":") > 1:
        raise ValueError(
            f"import_path must be of the form module:name or module.name, got {value!r}; for the "
            "variable `app` in main.py it is main:app"
        )
    if module.partition(".")[0] == "ray":
        fix = next((NAMES[each] for each in module.split(".")[2:3] if each in NAMES), "")
        raise ValueError(
            f"import_path {value!r} is Ray's own, and only `serve deploy` runs it; "
            f"{fix or 'name your own application, whose imports `ingress migrate` rewrites'}"
        )
    return value


def _name(value: str) -> str:
    if not value:
        raise ValueError("an application's name must not be empty; leave it out for 'default'")
    return value


def _variables(value: dict[str, Any]) -> dict[str, str]:
    for name, each in value.items():
        if not isinstance(each, str):
            raise ValueError(f"env_vars[{name!r}] must be a string, got {each!r}; put it in quotes")
        if not is_variable(name, each):
            raise ValueError(f"env_vars[{name!r}] cannot be a variable; correct its name or value")
    return value


def _percentage(value: object) -> object:
    if value is not None and not (is_number(value) and 0 <= value <= 100):
        raise ValueError(f"target_capacity must be a number from 0 to 100, got {value!r}")
    return value


class RuntimeEnv(Options):
    """The environment of an application: variables, and the folder its modules are in."""

    env_vars: Annotated[dict[str, Any], AfterValidator(_variables)] = Field(default_factory=dict)
    working_dir: str | None = None
    conda: object = None
    config: object = None
    container: object = None
    excludes: object = None
    image_uri: object = None
    java_jars: object = None
    mpi: object = None
    nsight: object = None
    pip: object = None
    py_executable: object = None
    py_modules: object = None
    rocprof_sys: object = None
    uv: object = None
    worker_process_setup_hook: object = None

    def folder(self, base: Path) -> Path | None:
        """Return the folder that `working_dir` names; `None` without one, or if it is remote.

        A relative path begins at the folder `base`.
        """
        if self.working_dir is None or self.is_remote:
            return None
        return (base / Path(self.working_dir.removeprefix("local://")).expanduser()).resolve()

    @property
    def is_remote(self) -> bool:
        """Return whether `working_dir` is an address that only a cluster fetches."""
        scheme = urlsplit(self.working_dir or "").scheme
        return len(scheme) > 1 and scheme != "local"  # one letter: a drive of Windows


class DeploymentOverrides(DeploymentConfig):
    """The options of one deployment that override those in code."""

    belong_to: ClassVar[str] = "a deployment"
    is_whole: ClassVar[bool] = False
    elsewhere: ClassVar[Mapping[str, str]] = {
        **DeploymentConfig.elsewhere,
        "route_prefix": "it belongs to the application: applications[].route_prefix.",
        **{
            name: f"it belongs to ray_actor_options.{name}."
            for name in ("memory", "num_cpus", "num_gpus", "resources", "runtime_env")
        },
    }

    name: str

    def overriding(self) -> dict[str, object]:
        """Return the options that the file has, as keywords of `Deployment.options`."""
        return {name: getattr(self, name) for name in self.model_fields_set if name != "name"}


class ApplicationConfig(Options):
    """One application of a file."""

    belong_to: ClassVar[str] = "an application"
    elsewhere: ClassVar[Mapping[str, str]] = {
        "host": "it belongs to http_options at the top.",
        "port": "it belongs to http_options at the top.",
        "env": "variables belong to runtime_env.env_vars.",
        **{
            name: f"it belongs to a deployment: deployments[].{name}."
            for name in (*DeploymentConfig.model_fields, *DeploymentConfig.renamed)
        },
        **dict.fromkeys(RuntimeEnv.model_fields, "it belongs to runtime_env."),
    }

    name: Annotated[str, AfterValidator(_name)] = "default"
    route_prefix: Annotated[str | None, AfterValidator(check_prefix)] = "/"
    import_path: Annotated[str, AfterValidator(_import_path)]
    args: dict[str, Any] = Field(default_factory=dict)
    runtime_env: RuntimeEnv = Field(default_factory=RuntimeEnv)
    deployments: list[DeploymentOverrides] = Field(default_factory=list)
    logging_config: LoggingConfig | None = None
    autoscaling_policy: Json = None
    external_scaler_enabled: bool = False

    @model_validator(mode="after")
    def _deployments_differ(self) -> Self:
        _refuse_twice("deployment", (each.name for each in self.deployments))
        return self

    def for_a_cluster(self) -> list[str]:
        """Return the options with values that only a cluster acts on."""
        found = [f"runtime_env.{name}" for name in self.runtime_env.changed() if name not in _HERE]
        if self.runtime_env.is_remote:
            found.append("runtime_env.working_dir (it is remote)")
        found += [name for name in self.changed() if name in _CLUSTER_APPLICATION]
        for each in self.deployments:
            given = [f"{name}={value!r}" for name, (value, _) in for_a_cluster(each).items()]
            found += [f"{one} of {each.name}" for one in (*given, *options_not_acted_on(each))]
        return found


_HERE = ("env_vars", "working_dir")
_CLUSTER_APPLICATION = ("autoscaling_policy", "external_scaler_enabled")


class GRPCOptions(Options):
    """The gRPC options of Ray."""

    port: int = 9000
    grpc_servicer_functions: list[str] = Field(default_factory=list)
    request_timeout_s: float | None = None
    enable_reflection: bool = True


class ServeConfig(Options):
    """A whole file."""

    belong_to: ClassVar[str] = "the file"
    elsewhere: ClassVar[Mapping[str, str]] = {
        "host": "it belongs to http_options.",
        "port": "it belongs to http_options.",
        **{
            name: f"it belongs to an application: applications[].{name}."
            for name in ("import_path", "args", "runtime_env", "deployments", "route_prefix")
        },
        "name": f"an application's is applications[].name; {_ANYSCALES}",
        "working_dir": (
            f"an application's is applications[].runtime_env.working_dir; {_ANYSCALES}"
        ),
        **dict.fromkeys(
            (
                *("cloud", "compute_config", "containerfile", "excludes", "image_uri", "project"),
                *("query_auth_token_enabled", "requirements", "tags", "py_modules", "env_vars"),
            ),
            _ANYSCALES,
        ),
    }

    proxy_location: Literal["Disabled", "HeadOnly", "EveryNode"] = "EveryNode"
    http_options: HTTPOptions = Field(default_factory=HTTPOptions)
    grpc_options: GRPCOptions = Field(default_factory=GRPCOptions)
    controller_options: Json = None
    logging_config: LoggingConfig | None = None
    tracing_config: Json = None
    applications: list[ApplicationConfig]
    target_capacity: Annotated[object, AfterValidator(_percentage)] = None

    @model_validator(mode="after")
    def _applications_differ(self) -> Self:
        if not self.applications:
            raise ValueError("applications is empty; name at least one, with its import_path")
        _refuse_twice("application", (each.name for each in self.applications))
        prefixes = [each.route_prefix for each in self.applications if each.route_prefix]
        _refuse_twice("route_prefix", prefixes)
        return self

    @property
    def logging(self) -> LoggingConfig:
        """The options of logging, the defaults if the file has none."""
        return self.logging_config or LoggingConfig()

    def for_a_cluster(self) -> list[str]:
        """Return the options with values that only a cluster acts on."""
        found = [name for name in _CLUSTER if name in self.changed()]
        if self.proxy_location == "Disabled":
            found.append("proxy_location (this process always serves HTTP)")
        found += [f"grpc_options.{name} ({_GRPC})" for name in self.grpc_options.changed()]
        return found + [
            f"{option} of application {each.name!r}"
            for each in self.applications
            for option in each.for_a_cluster()
        ]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of all applications, with those of `environ` that they name.

        Raises `ValueError`, with the names of both, if two applications disagree in a variable.
        """
        merged: dict[str, str] = {}
        owners: dict[str, str] = {}
        for each in self.applications:
            for name, value in expanded(each.runtime_env.env_vars, environ).items():
                if name == ENGINE and each.import_path == RAY_BUILDER:
                    continue  # it is for the workers of a cluster
                if merged.setdefault(name, value) != value:
                    raise ValueError(
                        f"applications {owners[name]!r} and {each.name!r} set {name} to "
                        f"{merged[name]!r} and {value!r}, and share one process; give both the "
                        "same value, or run them from two files"
                    )
                owners.setdefault(name, each.name)
        return merged

    def folder(self, base: Path) -> Path | None:
        """Return the folder that `working_dir` names, if one does; `base` is that of the file.

        Raises `ValueError`, with the names of both, if two applications disagree, and for a folder
        that does not exist.
        """
        found: Path | None = None
        owner = ""
        for each in self.applications:
            if (folder := each.runtime_env.folder(base)) is None:
                continue
            if found is not None and folder != found:
                raise ValueError(
                    f"applications {owner!r} and {each.name!r} have the working_dir {str(found)!r} "
                    f"and {str(folder)!r}, and share one process; give both the same folder, or "
                    "run them from two files"
                )
            if not folder.is_dir():
                raise ValueError(
                    f"application {each.name!r} has working_dir={each.runtime_env.working_dir!r}, "
                    "which is no folder; correct it"
                )
            found, owner = folder, each.name
        return found


_CLUSTER = ("controller_options", "tracing_config", "target_capacity")


def _refuse_twice(kind: str, names: Iterable[str]) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(
            f"two entries have the {kind} {twice[0]!r}; give each its own, or remove one"
        )


MOST_LINES = 100
T = TypeVar("T")
Unknown = tuple[Where, Key, type[Options]]
"""The way to a key that is no option, the key, and the model of the options beside it."""


def checked(top: FileValue, name: str) -> ServeConfig:
    """Return the options of a tree. Raises `ConfigFileError` with all its mistakes."""
    if not isinstance(top.value, dict):
        raise ConfigFileError(
            [f"{name}:{top.place}: the file must be a mapping with `applications`"]
        )
    options = list(_options_in(top, ServeConfig, ()))
    for node, _, model in options:
        _rename(node, model, name)
    unknown = list(_unknown(options))
    if unknown:
        raise ConfigFileError(_lines(name, unknown, _advice_on))
    try:
        return ServeConfig.model_validate(top.plain())
    except ValueError as error:  # a ValidationError is one too
        found = _causes(error, ())
    placed = sorted({(top.at(where), text) for where, text in found})
    raise ConfigFileError(_lines(name, placed, str))


def _lines(name: str, placed: Sequence[tuple[Position, T]], text: Callable[[T], str]) -> list[str]:
    """Return a line for each mistake; one line in all for more of them than people read."""
    shown = placed if len(placed) <= MOST_LINES else placed[:1]
    lines = [f"{name}:{place}: {text(each)}" for place, each in shown]
    if len(shown) < len(placed):
        lines = [f"{lines[0]}; and {len(placed) - 1:,} more mistakes, the last at {placed[-1][0]}"]
    return lines


def written(where: Where) -> str:
    """Return a path as text: `applications[0].name`."""
    text = ""
    for step in where:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def _unknown(
    options: Iterable[tuple[FileValue, Where, type[Options]]],
) -> Iterator[tuple[Position, Unknown]]:
    """Yield each key, at any depth, that is no option."""
    for node, where, model in options:
        for key in node.value:
            if key not in model.model_fields and key not in model.renamed:
                yield node.keys[key], (where, key, model)


def _rename(node: FileValue, model: type[Options], file: str) -> None:
    """Give older names of options their current ones, with a warning that has their place."""
    for old in model.renamed.keys() & node.value.keys():
        if (name := model.renamed[old]) not in node.value:
            place = node.keys[name] = node.keys[old]
            node.value[name] = node.value.pop(old)
            text = f"{old} is deprecated; use {name}, the same option"
            warnings.warn_explicit(text, DeprecationWarning, file, place.line)


def _options_in(
    node: FileValue, annotation: object, where: Where
) -> Iterator[tuple[FileValue, Where, type[Options]]]:
    """Yield the mappings of options. Values of a wrong type are not looked at."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Options):
        if isinstance(node.value, dict):
            yield node, where, annotation
            for key, value in node.value.items():
                if (field := annotation.model_fields.get(key)) is not None:
                    yield from _options_in(value, field.annotation, (*where, key))
    elif origin is list and isinstance(node.value, list):
        for number, each in enumerate(node.value):
            yield from _options_in(each, arguments[0], (*where, number))
    elif origin in (Annotated, Union, types.UnionType):
        for each in arguments:
            yield from _options_in(node, each, where)


def _advice_on(unknown: Unknown) -> str:
    where, key, model = unknown
    told = f"{written((*where, str(key)))} is not an option; "
    if advice := model.elsewhere.get(str(key)):
        return told + advice.rstrip(".")
    names = sorted(model.model_fields)
    nearest = difflib.get_close_matches(str(key), names, n=1)
    return told + (
        f"did you mean {nearest[0]}?" if nearest else f"the options are {', '.join(names)}"
    )


def _causes(error: BaseException, where: Where) -> Iterator[tuple[Where, str]]:
    """Yield path and text of each mistake, also of those in options inside of options."""
    # `Options.__init__` makes one line of an error with all mistakes, which is its context.
    whole = error if isinstance(error, ValidationError) else error.__context__
    if not isinstance(whole, ValidationError):
        yield where, f"{_path_of((*where, ''))}{error}"
        return
    for each in whole.errors(include_url=False):
        inside = (*where, *each["loc"])
        context = each.get("ctx", {}).get("error")
        if isinstance(context, ValueError):
            yield from _causes(context, inside)
        elif each["type"] == "must_be":
            yield inside, f"{_path_of(inside)}{each['msg']}"
        elif each["type"] == "missing":
            yield inside, f"{written(inside)} is missing; it is required"
        else:
            expected, _, _ = each["msg"].partition(" or instance of ")  # a class of ingress
            expected = expected.replace("Input should be", "must be")
            is_bare = each["type"] == "string_type" and not isinstance(each["input"], dict | list)
            fix = "; put it in quotes" if is_bare and each["input"] is not None else ""
            yield inside, f"{written(inside)} {expected}, got {_shown(each['input'])}{fix}"


def _path_of(where: Where) -> str:
    """Return the path around an option, which its message names."""
    around = written(where[:-1])
    return f"{around}: " if around else ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
