"""The file of `ingress run serve.yaml`: its mistakes, its values, and what is served."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer

from ingress.app.config_file.loading import ConfigFile
from ingress.app.config_file.models import ServeConfig
from ingress.app.config_file.origins import Origin, effective
from ingress.app.config_file.reading import ConfigFileError
from ingress.cli.run_command import check_file
from ingress.config import HTTPOptions
from tests.servers import INGRESS, environment, process, run_ingress, write_module

APP = """
import os
from fastapi import FastAPI
from pydantic import BaseModel
import ingress as serve

app = FastAPI()

@serve.deployment(num_replicas=2, max_ongoing_requests=7)
class Model:
    def __init__(self, size=1):
        self.size, self.config = size, None

    async def reconfigure(self, config):
        self.config = config

    async def get(self):
        return [self.size, self.config, os.environ.get("FROM_FILE"), os.getcwd()]

@serve.deployment
@serve.ingress(app)
class Front:
    def __init__(self, model):
        self.model = model

    @app.get("/")
    async def get(self):
        return await self.model.get.remote()

hello = Front.bind(Model.bind())

class Args(BaseModel):
    size: int

def builder(args: Args):
    return Front.bind(Model.bind(args.size))
"""

FILE = """
http_options: {port: 0, max_body_size: 10}
logging_config: {log_level: ERROR, enable_access_log: false}
applications:
- name: one
  import_path: app:hello
  route_prefix: /one
  runtime_env:
    env_vars: {FROM_FILE: "x${FROM_FILE}", INGRESS_FREEZE_GC: "0"}
    working_dir: elsewhere
    pip: [numpy]
  deployments:
  - name: Model
    num_replicas: 3
    user_config: {level: 1}
- name: two
  import_path: app.builder
  args: {size: 5}
  route_prefix: /two
"""


def problems(tmp_path: Path, text: str | bytes) -> list[str]:
    """Return the lines that refuse a file, each without the file's name."""
    path = tmp_path / "serve.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigFileError) as caught:
        ConfigFile.read(path)
    return [line.removeprefix(str(path)) for line in caught.value.lines]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_module(tmp_path, "app", APP)
    (tmp_path / "serve.yaml").write_text(FILE)
    (tmp_path / "elsewhere").mkdir()
    return tmp_path


# What is taken


def test_a_target_capacity_may_be_nothing(folder: Path) -> None:
    path = folder / "serve.yaml"
    path.write_text(f"target_capacity: 0\n{FILE}")

    assert ConfigFile.read(path, {}).config.target_capacity == 0


# What is refused


def test_every_unknown_key_is_named_with_its_place_path_and_nearest_name(tmp_path: Path) -> None:
    text = """
application: []
applications:
- name: a
  import_path: app:hello
  port: 80
  deployments:
  - name: Model
    num_replica: 3
    autoscaling_config: {max_replica: 3, policy: {function: x}}
  runtime_env: {enviroment: {}}
"""
    lines = problems(tmp_path, text)

    option = "is not an option; "
    nearest = option + "did you mean "
    inside = "applications[0].deployments[0]"
    assert lines[:5] == [
        f":2:1: application {nearest}applications?",
        f":6:3: applications[0].port {option}it belongs to http_options at the top",
        f":9:5: {inside}.num_replica {nearest}num_replicas?",
        f":10:26: {inside}.autoscaling_config.max_replica {nearest}max_replicas?",
        f":10:51: {inside}.autoscaling_config.policy.function {nearest}policy_function?",
    ]
    assert lines[5].startswith(":11:17: applications[0].runtime_env.enviroment is not an option; ")


NO_MAPPINGS = "applications:\n" + "- 1\n" * 5000
NO_OPTIONS = "".join(f"key_{number}: 1\n" for number in range(5000))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (NO_OPTIONS, r":1:1: key_0 is not an option; .*; and 4,999 more .* the last at 5000:1"),
        (NO_MAPPINGS, r":2:3: applications\[0\] must .*; and 4,999 more .* the last at 5001:3"),
    ],
    ids=["keys", "values"],
)
def test_thousands_of_mistakes_are_one_line(tmp_path: Path, text: str, line: str) -> None:
    [told] = problems(tmp_path, text)
    assert re.fullmatch(line, told)


def test_every_wrong_value_is_named_with_its_place_and_what_was_expected(tmp_path: Path) -> None:
    text = """
http_options: {port: 65536}
applications:
- import_path: main
  route_prefix: a
  runtime_env: {env_vars: {A: 1}}
  deployments:
  - name: Model
    num_replicas: 0
    autoscaling_config: {target_ongoing_requests: -1}
  - max_ongoing_requests: x
"""
    inside = "applications[0].deployments"
    expected = [
        ":2:22: http_options: port must be an integer from 0 to 65535, got 65536",
        ":4:16: applications[0].import_path: import_path must be of the form module:name",
        ":5:17: applications[0].route_prefix: Invalid route_prefix 'a', must start with",
        ":6:27: applications[0].runtime_env.env_vars: env_vars['A'] must be a string, got 1; put",
        f':9:19: {inside}[0]: num_replicas must be an integer ≥ 1 or "auto", got 0',
        f":10:51: {inside}[0].autoscaling_config: target_ongoing_requests must be a number > 0",
        f":11:5: {inside}[1].name is missing; it is required",
        f":11:27: {inside}[1]: max_ongoing_requests must be an integer ≥ 1, got 'x'",
    ]
    lines = problems(tmp_path, text)
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected


DOUBLED = "\n".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]"
    for before, name in zip("abcdefg", "bcdefgh", strict=True)
)

NESTED = "\n".join(f"a{n}: &a{n} {'[' * 30}{n and f'*a{n - 1}'}{']' * 30}" for n in range(60))

# A merge of each would copy so many keys, or mappings, each time: minutes, and all of the memory.
KEYS = ", ".join(f"k{number}: 1" for number in range(20_000))
MERGES = f"a:\n  &a {{{KEYS}}}\nb: {{{', '.join(['<<: *a'] * 50_000)}}}"
LISTS = f"a:\n  &a [{', '.join(['{}'] * 20_000)}]\nb: {{{', '.join(['<<: *a'] * 50_000)}}}"
HOSTILE: dict[str, tuple[str | bytes, str]] = {
    "10 MB": (b"a: " + b"x" * 10_000_000, " has more than 1,000,000 bytes"),
    "deep nesting": ("a: " + "[" * 900, ":1:43: nested more than 40 levels deep"),
    "deep mapping": ("{a: " * 900, ":1:161: nested more than 40 levels deep"),
    "aliases that nest": (NESTED, ":2:39: nested more than 40 levels deep"),
    "deeper than libyaml goes": ("a: " + "[" * 100_000, "nest"),  # from 0.2.6 on, in its words
    "anchors that expand": (f"a: &a [x]\n{DOUBLED}", "values, with aliases expanded"),
    "merges of a large mapping": (MERGES, ":3:4: more than 100,000 values, with aliases expanded"),
    "merges of a large list": (LISTS, ":3:4: more than 100,000 values, with aliases expanded"),
    "an anchor in itself": ("a: &a [*a]", ":1:8: *a is inside of its own anchor"),
    "no such anchor": ("a: *b", ":1:4: there is no anchor &b before this"),
    "a key twice": ("a: 1\nb: 2\na: 3", ":3:1: the key 'a' occurs twice, first at 1:1; remove"),
    "a second document": (
        "a: 1\n---\nb: 2",
        ":2:1: a second document begins here; put it into a file of",
    ),
    "a tag": ("a: !!python/object/apply:os.system [ls]", "is not allowed here"),
    "braces": ("{" * 500_000 + "\n" + "{{" * 200_000, "nest"),
    "a large kind": (f"kind: [{'a, ' * 9999}]", "has no applications; give a RayService"),
    "not YAML": ("a: [1\nb: 2", ":2:2: did not find expected ',' or ']'"),
    "not UTF-8": (b"a: 1\nb: \xff", ":2:4: not UTF-8; save the file as UTF-8"),
    "a control character": ("a: \x00", ":1:4: "),
    "a number without end": ("a: " + "9" * 9999, ":1:4: "),
    "empty": ("# nothing\n", ":1:1: the file is empty; it needs `applications`"),
    "a list": ("- a", ":1:1: the file must be a mapping with `applications`"),
    "a mapping as key": ("{a: 1}: 2", "a key must be a name, not a mapping or a list"),
}


@pytest.mark.reliability("S10")
@pytest.mark.parametrize(("text", "expected"), HOSTILE.values(), ids=list(HOSTILE))
def test_a_hostile_file_is_refused_in_one_line(
    tmp_path: Path, text: str | bytes, expected: str
) -> None:
    (line,) = problems(tmp_path, text)

    assert expected in line
    assert "\n" not in line
    assert len(line) < 300


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match=r"cannot read '.*nowhere.yaml': No such file"):
        ConfigFile.read(tmp_path / "nowhere.yaml")


def test_merged_keys_and_aliases_are_those_of_yaml(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("""
applications:
- &first {name: a, route_prefix: /a, import_path: m:a, args: {x: &x [1, 2]}}
- {<<: *first, name: b, route_prefix: /b, args: {x: *x}}
""")
    config = ConfigFile.read(path).config

    assert [each.name for each in config.applications] == ["a", "b"]
    assert config.applications[1].import_path == "m:a"
    assert config.applications[1].args == {"x": [1, 2]}


APPLICATION = """\
applications:
- import_path: main:app
  deployments:
  - {name: Main, num_replicaz: 2}
"""
INSIDE = "applications[0].deployments[0].num_replicaz is not an option; did you mean num_replicas?"


def manifest(config: str, *, indent: int = 4) -> str:
    lines = "".join(f"{' ' * indent}{line}\n" for line in config.splitlines())
    return f"kind: RayService\nspec:\n  serveConfigV2: |  # the file\n{lines}  more: 1\n"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (manifest(APPLICATION), "7:22"),
        (manifest(f"\n{APPLICATION}", indent=8), "8:26"),
        (manifest(f"---\n# served\n{APPLICATION}"), "9:22"),
        (manifest(APPLICATION).replace("\n", "\r\n"), "7:22"),
        (json.dumps({"kind": "RayService", "spec": {"serveConfigV2": APPLICATION}}), "1:50"),
        (f"{{kind: ConfigMap}}\n---\n{manifest(APPLICATION)}---\nkind: Service\n---\n", "9:22"),
    ],
    ids=["block", "indented", "with a start", "crlf", "json", "among others"],
)
def test_a_mistake_in_a_ray_service_has_its_place_in_the_manifest(
    tmp_path: Path, text: str, place: str
) -> None:
    assert problems(tmp_path, text) == [f":{place}: {INSIDE}"]


def test_a_ray_service_is_its_serve_config(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(manifest(APPLICATION.replace("num_replicaz", "num_replicas")))
    file = ConfigFile.read(path)
    where = ("applications", 0, "deployments", 0, "num_replicas")

    assert file.config.applications[0].deployments[0].num_replicas == 2
    assert file.place_of(where) == "service.yaml:7:36"


NO_FILE: dict[str, tuple[str, str]] = {
    "another kind": ("kind: RayCluster", ":1:7: kind: 'RayCluster' has no applications; give a"),
    "a list of kubectl": ("kind: List", "the RayService among its items into a file of its own"),
    "a kustomization": ("kind: Kustomization", "give its output: kubectl kustomize FOLDER > FILE"),
    "without a config": ("kind: RayService\nspec: {a: 1}", ":2:7: a RayService needs spec.serve"),
    "a mapping": (
        "kind: RayService\nspec: {serveConfigV2: {applications: []}}",
        ":2:23: a RayService needs spec.serveConfigV2, a text; write `serveConfigV2: |`",
    ),
    "two services": (f"{manifest(APPLICATION)}---\n{manifest(APPLICATION)}", ":9:1: a second doc"),
    "a file and an object": (f"{APPLICATION}---\nkind: Service", ":5:1: a second document"),
    "an anchor of another": ("a: &a 1\n---\nb: *a", ":3:4: there is no anchor &a before this"),
    "a template": (
        manifest("applications:\n- import_path: {{ .Values.path }}"),
        "; line 5 has {{ .Values.path }}: if this is a template of Helm, give its output: helm",
    ),
    "a directive of a template": ("{{- if .Values.on }}\napplications: []", "; line 1 has {{- if"),
}


@pytest.mark.parametrize(("text", "expected"), NO_FILE.values(), ids=list(NO_FILE))
def test_what_is_no_file_says_which_one_to_give(tmp_path: Path, text: str, expected: str) -> None:
    (line,) = problems(tmp_path, text)

    assert expected in line


ELSEWHERE: dict[str, tuple[str, str]] = {
    "a word of YAML": (
        "applications: [{name: no, import_path: 'main:app'}]",
        ":1:23: applications[0].name must be a valid string, got False; put it in quotes",
    ),
    "a deployment by its name": (
        "applications: [{import_path: 'main:app', deployments: [Model]}]",
        "deployments[0] must be a valid dictionary, got 'Model'",
    ),
    "a builder of Ray": (
        "applications: [{import_path: 'ray.serve.llm:build_openai_app'}]",
        "is Ray's own, and only `serve deploy` runs it; write a deployment that calls the model",
    ),
    "an application of Ray": (
        "applications: [{import_path: ray.some.app}]",
        "is Ray's own, and only `serve deploy` runs it; name your own application",
    ),
    "runtime_env at the top": ("runtime_env: {}", "to an application: applications[].runtime_env"),
    "a service's name": ("name: shop", "applications[].name; a service of Anyscale has it at the"),
    "an image": ("image_uri: a", "a service of Anyscale has it at the top: leave it out here"),
    "an option of deployments": (
        "applications: [{import_path: 'm:a', max_ongoing_requests: 3}]",
        "it belongs to a deployment: deployments[].max_ongoing_requests",
    ),
    "a prefix of a deployment": (
        "applications: [{import_path: 'm:a', deployments: [{name: A, route_prefix: /a}]}]",
        "it belongs to the application: applications[].route_prefix",
    ),
    "resources of a deployment": (
        "applications: [{import_path: 'm:a', deployments: [{name: A, num_gpus: 1}]}]",
        "it belongs to ray_actor_options.num_gpus",
    ),
}


@pytest.mark.parametrize(("text", "expected"), ELSEWHERE.values(), ids=list(ELSEWHERE))
def test_what_other_files_have_says_where_it_belongs(
    tmp_path: Path, text: str, expected: str
) -> None:
    assert expected in problems(tmp_path, text)[0]


def test_older_names_of_options_count_with_a_warning_at_their_place(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("""
applications:
- import_path: main:app
  deployments:
  - name: Main
    max_concurrent_queries: 7
    autoscaling_config: {target_num_ongoing_requests_per_replica: 3}
""")
    with pytest.warns(DeprecationWarning, match="is deprecated; use") as caught:
        file = ConfigFile.read(path)
    (config,) = file.config.applications[0].deployments
    where = ("applications", 0, "deployments", 0, "max_ongoing_requests")

    assert config.max_ongoing_requests == 7
    assert config.autoscaling_config is not None
    assert config.autoscaling_config.target_ongoing_requests == 3
    assert file.place_of(where) == "serve.yaml:6:29"
    assert [(each.filename, each.lineno) for each in caught] == [(str(path), 6), (str(path), 7)]
    assert str(caught[0].message).startswith("max_concurrent_queries is deprecated; use max_ong")


def test_an_option_by_both_its_names_is_refused(tmp_path: Path) -> None:
    both = "{name: A, max_ongoing_requests: 1, max_concurrent_queries: 1}"
    (line,) = problems(tmp_path, f"applications: [{{import_path: 'm:a', deployments: [{both}]}}]")

    assert "max_ongoing_requests and max_concurrent_queries are both given" in line


TWICE: dict[str, tuple[str, str]] = {
    "names": (
        "[{import_path: 'm:a', route_prefix: /a}, {import_path: 'm:b', route_prefix: /b}]",
        "two entries have the application 'default'",
    ),
    "prefixes": (
        "[{import_path: 'm:a'}, {import_path: 'm:b', name: b}]",
        "two entries have the route_prefix '/'",
    ),
    "none": ("[]", "applications is empty"),
}


@pytest.mark.parametrize(("applications", "expected"), TWICE.values(), ids=list(TWICE))
def test_applications_have_names_and_prefixes_of_their_own(
    tmp_path: Path, applications: str, expected: str
) -> None:
    (line,) = problems(tmp_path, f"applications: {applications}")

    assert expected in line


CONFLICTS: dict[str, tuple[str, str, str]] = {
    "env_vars": (
        "{env_vars: {A: '1'}}",
        "{env_vars: {A: '2'}}",
        "applications 'a' and 'b' set A to '1' and '2', and share one process",
    ),
    "env_vars of one": (
        "{env_vars: {A: '1', B: '${A}'}}",
        "{env_vars: {B: '${A}'}}",
        "applications 'a' and 'b' set B to '1' and '', and share one process",
    ),
    "working_dir": (
        "{working_dir: elsewhere}",
        "{working_dir: .}",
        "applications 'a' and 'b' have the working_dir ",
    ),
    "no folder": (
        "{working_dir: nowhere}",
        "{}",
        "application 'a' has working_dir='nowhere', which is no folder",
    ),
}


@pytest.mark.parametrize(("one", "other", "expected"), CONFLICTS.values(), ids=list(CONFLICTS))
def test_two_applications_that_cannot_share_a_process_are_both_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, one: str, other: str, expected: str
) -> None:
    monkeypatch.chdir(folder)
    path = folder / "conflict.yaml"
    path.write_text(f"""
applications:
- {{name: a, route_prefix: /a, import_path: app:hello, runtime_env: {one}}}
- {{name: b, route_prefix: /b, import_path: app:hello, runtime_env: {other}}}
""")
    file = ConfigFile.read(path)

    with pytest.raises(ConfigFileError) as caught:
        file.prepare()
    assert f"{path}: {expected}" in str(caught.value)
    assert (Path.cwd(), os.environ.get("A")) == (folder, None)


def test_the_options_of_a_cluster_are_listed_once(folder: Path) -> None:
    path = folder / "cluster.yaml"
    path.write_text("""
tracing_config: {enabled: true}
applications:
- import_path: app:hello
  runtime_env: {working_dir: "https://host/app.zip", pip: [numpy]}
  deployments:
  - {name: Model, placement_group_bundles: [{CPU: 1}]}
""")
    assert ConfigFile.read(path).config.for_a_cluster() == [
        "tracing_config",
        "runtime_env.pip of application 'default'",
        "runtime_env.working_dir (it is remote) of application 'default'",
        "placement_group_bundles=[{'CPU': 1.0}] of Model of application 'default'",
    ]


WRONG_APPS: dict[str, tuple[str, str]] = {
    "no module": ("import_path: nothing:app", "3:16: there is no module 'nothing'"),
    "no deployment": (
        "import_path: app:hello\n  deployments: [{name: Mode}]",
        "4:17: Deployment 'Mode' does not exist. Available: ['Model', 'Front']",
    ),
    "no reconfigure": (
        "import_path: app:hello\n  deployments: [{name: Front, user_config: {a: 1}}]",
        "4:17: user_config is set but deployment 'Front' is a class missing reconfigure",
    ),
    "arguments of no builder": (
        "import_path: app:hello\n  args: {size: 1}",
        "3:16: 'app:hello' is an application, and only a builder takes arguments, got size",
    ),
    "arguments that the builder refuses": (
        "import_path: app:builder\n  args: {sise: 1}",
        "3:16: the arguments of 'app:builder' are not those of Args: size: Field required",
    ),
}


@pytest.mark.parametrize(("application", "expected"), WRONG_APPS.values(), ids=list(WRONG_APPS))
def test_an_application_that_cannot_be_loaded_is_named_with_its_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, application: str, expected: str
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "app", raising=False)
    path = folder / "wrong.yaml"
    path.write_text(f"\napplications:\n- {application}\n")
    file = ConfigFile.read(path)

    with pytest.raises(ConfigFileError) as caught:
        file.load(0, None)
    sys.modules.pop("app", None)  # other tests have an `app` of their own
    assert str(caught.value).startswith(f"{path}:{expected}")


# What is served


def test_a_file_serves_its_applications_with_its_options(folder: Path) -> None:
    (folder / "variables").write_text("FROM_FILE=y\n")
    # NumPy would have read the number of threads: the process starts again, and expands it again.
    (folder / "numpy.py").touch()
    (folder / "app.py").write_text(f"import numpy\n{APP}")
    command = [*INGRESS, "run", "serve.yaml", "--env-file", "variables"]
    with process(command, folder, environment(folder)) as server:
        server.wait_for("Ctrl-C to stop")
        with httpx.Client(base_url=server.url, trust_env=False) as client:
            where = str(folder / "elsewhere")
            assert client.get("/one/").json() == [1, {"level": 1}, "xy", where]
            assert client.get("/two/").json() == [5, None, "xy", where]
            assert client.get("/-/routes").json() == {"/one": "one", "/two": "two"}
            assert client.post("/one/", content=b"x" * 11).status_code == 413
    assert "serve.yaml: Without effect here, only on a cluster: runtime_env.pip" in server.output
    assert '"GET /one/' not in server.output  # enable_access_log: false


@pytest.mark.thorough
def test_workers_serve_a_file_too(folder: Path) -> None:
    command = [*INGRESS, "run", "serve.yaml", "--workers", "2"]
    with process(command, folder, environment(folder)) as server:
        server.wait_for("Application 'two' is ready at .*, in 2 processes")
        with httpx.Client(base_url=server.url, trust_env=False) as client:
            assert client.get("/one/").json()[:3] == [1, {"level": 1}, "x"]
            assert client.get("/two/").json()[:3] == [5, None, "x"]
            assert client.get("/-/healthz").text == "success"
        server.signal()
        assert server.wait() == 0


def test_run_refuses_the_options_that_each_application_of_a_file_has(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ConfigFile.read(folder / "serve.yaml")

    with pytest.raises(typer.Exit):
        check_file(file, name="shop", route_prefix=None, factory=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert "--name is for MODULE:APP; in serve.yaml, each application has its own" in line


# ingress config, ingress build


def test_each_value_is_shown_with_its_origin(folder: Path) -> None:
    result = run_ingress(
        folder,
        *("config", "serve.yaml", "--show-origin", "--json", "--port", "9000"),
        INGRESS_MAX_HEADER_BYTES="4096",
        INGRESS_FREEZE_GC="1",
        FROM_FILE="y",
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, tuple[Any, str, str]] = {
        each["path"]: (each["value"], each["origin"], each["detail"])
        for each in json.loads(result.stdout)["values"]
    }
    model = "applications[0].deployments[0]"

    assert found["http_options.port"] == (9000, "command line", "")
    assert found["http_options.max_body_size"] == (10, "file", "serve.yaml:2:40")
    of_variable = (4096, "environment", "INGRESS_MAX_HEADER_BYTES")
    assert found["http_options.max_header_bytes"] == of_variable
    assert found["http_options.root_path"] == ("", "default", "")
    assert found[f"{model}.num_replicas"] == (3, "file", "serve.yaml:14:19")
    assert found[f"{model}.max_ongoing_requests"] == (7, "code", "")
    assert found[f"{model}.max_queued_requests"] == (-1, "default", "")
    assert found["applications[1].deployments[0].num_replicas"] == (2, "code", "")
    variable = found["applications[0].runtime_env.env_vars.FROM_FILE"]
    assert variable == ("xy", "file", "serve.yaml:9:27")
    folder_of_one = found["applications[0].runtime_env.working_dir"]
    assert folder_of_one == ("elsewhere", "file", "serve.yaml:10:18")
    # As in Ray, the file's variables replace those of the environment.
    assert found["environment.INGRESS_FREEZE_GC"] == (0, "file", "env_vars INGRESS_FREEZE_GC")


def test_a_flag_that_rays_throughput_mode_sets_names_it(folder: Path) -> None:
    flag, mode = "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "RAY_SERVE_THROUGHPUT_OPTIMIZED"
    file = ConfigFile.read(folder / "serve.yaml", {mode: "1"})

    values = effective(file, [], from_code=HTTPOptions(), command_line={})

    (shown,) = (each for each in values if each.where == ("environment", flag))
    assert (shown.value, shown.origin, shown.detail) == (0, Origin.ENVIRONMENT, mode)


def test_each_option_of_http_has_its_origin_but_the_location(folder: Path) -> None:
    file = ConfigFile.read(folder / "serve.yaml", {})
    from_code = HTTPOptions(request_timeout_s=3)

    values = effective(file, [], from_code=from_code, command_line={"port": 1})

    found = {each.where[1]: each for each in values if each.where[0] == "http_options"}
    assert found.keys() == HTTPOptions.model_fields.keys() - {"location"}
    origins = {name: found[name].origin for name in ("port", "request_timeout_s", "root_path")}
    assert origins == {
        "port": Origin.COMMAND_LINE,
        "request_timeout_s": Origin.CODE,
        "root_path": Origin.DEFAULT,
    }


def test_run_reads_what_build_writes_and_what_config_prints(folder: Path) -> None:
    built = run_ingress(folder, "build", "app:hello", "app:hello", "-o", "built.yaml")
    assert built.returncode == 0, built.stderr
    file = ConfigFile.read(folder / "built.yaml")

    assert "INGRESS_ENGINE" not in file.environment()  # it is for a cluster's workers
    assert file.config.for_a_cluster() == []
    (folder / "again.yaml").write_text(run_ingress(folder, "config", "built.yaml").stdout)
    (one,) = ConfigFile.read(folder / "again.yaml").config.applications
    assert one.args["target"] == "app:hello"
    assert {each.name: each.num_replicas for each in one.deployments} == {"Model": 2, "Front": 1}


def test_explain_takes_the_manifest_that_build_writes_for_kuberay(folder: Path) -> None:
    options = ("--kuberay", "-o", "shop.yaml")
    assert run_ingress(folder, "build", "app:hello", *options).returncode == 0
    explained = run_ingress(folder, "explain", "shop.yaml")

    assert explained.returncode == 0, explained.stderr
    assert "Front.get" in explained.stdout
    shown = run_ingress(folder, "config", "shop.yaml")
    assert "target: app:hello" in shown.stdout
    told = "shop.yaml: Without effect here, only on a cluster: the pods of the RayService"
    assert shown.stderr.startswith(told)


def test_the_schema_has_the_options_of_the_models() -> None:
    schema = ServeConfig.model_json_schema()

    assert set(schema["properties"]) == set(ServeConfig.model_fields)
    assert schema["required"] == ["applications"]
    assert schema["additionalProperties"] is False
    deployment = schema["$defs"]["DeploymentOverrides"]["properties"]
    assert deployment["max_ongoing_requests"]["minimum"] == 1
    assert deployment["rolling_update_percentage"]["exclusiveMinimum"] == 0
