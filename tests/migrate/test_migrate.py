"""`ingress migrate`: code for Ray Serve, rewritten, and what is left to do by hand."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingress.migrate import advice
from ingress.migrate.rewriting import rewritten
from tests.pages.test_public_paths import PATHS
from tests.programs import run_ingress
from tests.ray_programs import exported, random_module, unbound
from tests.servers import ingress_run, invoke, wait_until

REWRITTEN = {
    "serve": ("from ray import serve", "import ingress as serve"),
    "serve-as": ("from ray import serve as s", "import ingress as s"),
    "module": ("import ray.serve\nray.serve.run(1)", "import ingress\ningress.run(1)"),
    "module-as": ("import ray.serve as serve", "import ingress as serve"),
    "submodule": ("import ray.serve.handle", "import ingress.handle"),
    "submodule-as": ("import ray.serve.schema as s", "import ingress.schema as s"),
    "several": ("import os, ray.serve, sys", "import os, ingress, sys"),
    "name": ("from ray.serve import deployment, run", "from ingress import deployment, run"),
    "name-as": ("from ray.serve import batch as b", "from ingress import batch as b"),
    "from-module": (
        "from ray.serve.handle import DeploymentHandle as D",
        "from ingress.handle import DeploymentHandle as D",
    ),
    "module-of-ray-only": (
        "from ray.serve.deployment import Deployment",
        "from ingress import Deployment",
    ),
    "parentheses": (
        "from ray.serve import (  # one\n    batch,  # two\n    run,\n)  # three",
        "from ingress import (  # one\n    batch,  # two\n    run,\n)  # three",
    ),
    "comment-at-serve": (
        "from ray import (\n    serve,  # to serve\n)  # end",
        "import ingress as serve  # to serve  # end",
    ),
    "continued": ("from ray.serve \\\n    import run", "from ingress \\\n    import run"),
    "in-a-function": (
        "def f():\n    from ray import serve\n    return serve",
        "def f():\n    import ingress as serve\n    return serve",
    ),
    "in-a-line": ("if 1: from ray import serve; serve", "if 1: import ingress as serve; serve"),
    "unused": ("import ingress\nimport ray\n\ningress", "import ingress\n\ningress"),
    "unused-first": ("import ray\n\nfrom ray import serve", "import ingress as serve"),
    "unused-alone": (
        "import ingress\nif 1:\n    import ray as r",
        "import ingress\nif 1:\n    pass",
    ),
    "shadowed": (
        "import ray, ray.serve\ndef f(ray):\n    return ray.get(1)",
        "import ingress\ndef f(ray):\n    return ray.get(1)",
    ),
    "dotted": ("import ray\nray.serve.run(1)", "import ingress\ningress.run(1)"),
    "dotted-as": ("import ray as r\nr.serve.run(1)", "import ingress\ningress.run(1)"),
    "starts-ray": (
        "import ray\nfrom ray import serve\n\nray.init(address='auto')\nserve.run(1)",
        "import ingress as serve\n\nserve.run(1)",
    ),
    "starts-ray-once": (
        "import ray as r\nif not r.is_initialized():\n    r.init()\nr.serve.run(1)\nr.shutdown()",
        "import ingress\ningress.run(1)\n",
    ),
    "starts-ray-in-main": (
        "import ray\nfrom ray import serve\nif __name__ == '__main__':\n    ray.init()",
        "import ingress as serve\nif __name__ == '__main__':\n    pass",
    ),
    "starts-ray-in-a-line": (
        "import ray.serve\nray.init(); ray.serve.run(1)",
        "import ingress\npass; ingress.run(1)",
    ),
    "guide-of-routers": (
        "from ray.serve.request_router import ReplicaResult, RunningReplica",
        "from ingress.request_router import ReplicaResult, RunningReplica",
    ),
    "guide-of-routers-app": (
        "from ray.serve.context import _get_internal_replica_context",
        "from ingress.context import _get_internal_replica_context",
    ),
    "own-ingress": (
        "import ray.serve\nfrom ray.serve import ingress\nray.serve.run(ingress)",
        "import ingress as serve\nfrom ingress import ingress\nserve.run(ingress)",
    ),
    "annotation": (
        "import ray.serve\ndef f(h: 'list[ray.serve.DeploymentHandle]'): ...",
        "import ingress\ndef f(h: 'list[ingress.DeploymentHandle]'): ...",
    ),
    "try": (
        "try:\n    import ray\n    from ray import serve\nexcept ImportError:\n    serve = None",
        "try:\n    import ingress as serve\nexcept ImportError:\n    serve = None",
    ),
    "text-is-left": ("from ray import serve\n'ray.serve'", "import ingress as serve\n'ray.serve'"),
    "non-ascii": (
        "import ray.serve\nx = 'äöü€😀', ray.serve.run, 'é'  # ü",
        "import ingress\nx = 'äöü€😀', ingress.run, 'é'  # ü",
    ),
    "crlf": (
        "import ray\r\nfrom ray import serve\r\n\r\nray.serve.run(serve)\r\n",
        "import ingress\r\nimport ingress as serve\r\n\r\ningress.run(serve)\r\n",
    ),
}

LEFT = {
    "get": ("import ray\nray.get(1)", 2, "ray.get", "await response, or response.result()"),
    "put": ("import ray\nray.put(1)", 2, "ray.put", "pass the object itself"),
    "wait": ("from ray import wait\nwait([])", 2, "ray.wait", "asyncio.wait"),
    "init": ("import ray\nray.init()", 2, "ray.init", "remove it"),
    "shutdown": ("import ray\nray.shutdown()", 2, "ray.shutdown", "serve.shutdown()"),
    "deploy": (
        "from ray import serve\nA.options(name='a').deploy(1)",
        *(2, ".deploy", "serve.run(Name.bind(...)) starts it"),
    ),
    "get-handle": ("from ray import serve\nA.get_handle()", 2, ".get_handle", "returns its handle"),
    "old-option-of-a-handle": (
        "from ray import serve\nh.options(use_new_handle_api=True)",
        *(2, "use_new_handle_api", "it has been removed"),
    ),
    "init-with-variables": (
        "import ray.serve\nray.init(runtime_env={'env_vars': {}})\nray.serve.run(1)",
        *(2, "ray.init", "starts everything in this process; and `import ray`"),
    ),
    "init-of-a-call": (
        "import ray.serve\nray.init(address=find())\nray.serve.run(1)",
        *(2, "ray.init", "remove it"),
    ),
    "init-by-itself": (
        "from ray import init, serve\ninit()",
        *(2, "ray.init", "remove it"),
    ),
    "init-in-a-fixture": (
        "import ray.serve\ndef cluster():\n  yield ray.init()\nray.serve.run(1)",
        *(3, "ray.init", "remove it"),
    ),
    "run-host": (
        "from ray import serve\nserve.run(1, host='0.0.0.0')",
        *(2, "host", "call serve.start(http_options={'host': ..., 'port': ...}) before it"),
    ),
    "function": ("import ray\n@ray.remote\ndef f(): ...", 2, "ray.remote", 'isolation="process"'),
    "actor": ("import ray\n@ray.remote(num_cpus=1)\nclass A: ...", 2, "ray.remote", "deployment"),
    "reference": ("import ray\nx: ray.ObjectRef", 2, "ray.ObjectRef", "DeploymentResponse"),
    "data": ("import ray.data", 1, "ray.data", "ingress only serves"),
    "metrics": ("from ray.util.metrics import Counter", 1, "ray.util.metrics", "ingress.metrics"),
    "llm": ("from ray.serve import llm", 1, "ray.serve.llm", "calls the model"),
    "attribute": ("from ray import serve\nserve.llm", 2, "ray.serve.llm", "calls the model"),
    "older": (
        "from ray.serve.handle import RayServeHandle",
        *(1, "RayServeHandle", "use DeploymentHandle"),
    ),
    "private": ("from ray.serve._private.x import y", 1, "_private", "Ray's own"),
    "star": ("from ray.serve import *", 1, "ray.serve.*", "name the imports"),
    "grpc": ("from ray import serve\nserve.start(grpc_options=1)", 2, "grpc_options", "no gRPC"),
    "detached": (
        "from ray import serve\nserve.start(detached=True)",
        2,
        "detached",
        "http_options",
    ),
    "http": (
        "from ray import serve\nserve.start(http_options={'middlewares': []})",
        *(2, "middlewares", "add the middleware to the FastAPI app"),
    ),
    "queries": (
        "from ray import serve\n@serve.deployment(max_concurrent_queries=1)\ndef f(): ...",
        *(2, "max_concurrent_queries", "use max_ongoing_requests"),
    ),
    "options": (
        "from ray import serve\nA.options(placement_group_bundles=[])",
        *(2, "placement_group_bundles", "no placement groups"),
    ),
    "pip": (
        "from ray import serve\nserve.deployment(ray_actor_options={'runtime_env': {'pip': []}})",
        *(2, "runtime_env['pip']", "environment of the server"),
    ),
    "gpus": (
        "from ray import serve\nserve.deployment(ray_actor_options={'num_gpus': 1})",
        *(2, "num_gpus", 'isolation="process"'),
    ),
    "tried": ("try:\n    import ray\nexcept ImportError:\n    x = 1", 2, "ray", "remove the `try`"),
    "exported": ("import ray\n__all__ = ['ray']", 2, "ray", "`__all__` exports it"),
    "no-serve": ("import os, ray\nos", 1, "ray", "the file stays as it is"),
    "bare": ("import ray\nprint(ray)", 2, "ray", "remove the use"),
    "patched": ("from mock import patch\npatch('ray.serve.run')", 2, "ray.serve.run", "this text"),
}

KEPT = {
    "deleted": "import ray\nrun = ray.serve.run\ndel ray",
    "global": "ray = None\ndef f():\n  global ray\n  import ray\nf()\nray.serve.run(ray.get(1))",
    "global-only": "def f():\n  global ray\n  import ray\nf()\nray.serve.run(1)",
    "nonlocal": """
def f():
    ray = None
    def g():
        nonlocal ray
        import ray
    g()
    ray.serve.run(1)
f()
""",
    "rebound": "import ray\nray.serve.run(1)\nray = 1\nlog(ray)",
    "loop": "import ray\nray.serve.run(1)\nfor ray in [1]: log(ray)",
    "walrus": "import ray\n[ray := ray.serve for _ in [1]]\nray.run(1)",
    "class": "class C:\n  import ray\n  def f(self): self.ray.serve.run(1)\nC().f()",
    "class-attribute": "import ray\nclass C:\n  ray = ray\nC.ray.serve.run(1)",
    "replaced": "import ray\nray.serve = log\nray.serve(1)",
    "all-sum": "import ray\n__all__ = ('ray',) + ('log',)",
    "all-more": "import ray\n__all__ = []\n__all__ += ['ray']",
    "all-append": "import ray\n__all__ = []\n__all__.append('ray')",
    "all-extend": "import ray\n__all__ = []\n__all__.extend(['ray'])",
    "all-split": "import ray\n__all__ = 'ray log'.split()",
    "globals": "import ray\nglobals()['ray'].get(1)",
    "globals-name": "import ray\nfor name in ['ray']: globals()[name].get(1)",
    "locals": "def f():\n  import ray\n  locals().get('ray').get(1)\nf()",
    "vars": "import ray\nvars()['ray'].get(1)",
    "modules": "import ray, sys\nsys.modules[__name__].ray.get(1)",
    "getattr": "import ray, sys\ngetattr(sys.modules[__name__], 'ray').get(1)",
    "by-name": "import ray, importlib\nimportlib.import_module(__name__).ray.get(1)",
    "main": "import ray\ndef f():\n  import __main__\n  __main__.ray.get(1)",
    "frame": "import ray, sys\nsys._getframe().f_globals['ray'].get(1)",
    "eval": "import ray\neval('ray.get(1)')",
    "eval-name": "import ray\ncode = 'r' + 'ay'\neval(code).get(1)",
    "exec": "import ray\nexec('if 1: ray.get(1)')",
    "cast": "import ray\nfrom typing import cast\ncast('ray.ObjectRef', 1)",
    "bound": "import ray\nfrom typing import TypeVar\nT = TypeVar('T', bound='ray.ObjectRef')",
    "annotation": 'import ray\ndef f(x: \'ray.\' \'ObjectRef\') -> """ray.ObjectRef""": ...',
    "type-comment": "import ray\ndef f(x):\n  # type: (ray.ObjectRef) -> None\n  ...",
    "example": "import ray\nEXAMPLE = 'as in:\\n>>> ray.get(1)'",
    "as-itself": "import ray as ray",
    "noqa": "import ray  # noqa: F401",
    "decorator": "import ray\n@ray.remote\ndef f(): ...",
    "module-of-ray": "import ray.util\nray.serve.run(ray.util.list())",
    "branches": "if log: import ray\nelse: import ray.serve\nray.serve.run(ray.get(1))",
    "other-scope": "import ray\ndef f():\n  ray.serve.run(ray.get(1))\n  import ingress\nf()",
    "nested": """
import ray as r, ray
def f():
    r.serve.run(ray.get(1))
    def g():
        r.serve.run(1)
        import ray
        ray.serve.run(ray.get(1))
    g()
f()
""",
}


def written(folder: Path, source: str) -> str:
    """Return a file after `--write`, which must leave nothing for a second run."""
    path = folder / "main.py"
    path.write_bytes(source.encode())
    first = invoke(folder, "migrate", "main.py", "--write")
    new = path.read_bytes().decode()
    second = invoke(folder, "migrate", "main.py", "--write")

    assert path.read_bytes().decode() == new
    assert "no files changed" in second.output
    assert second.exit_code == first.exit_code
    return new


@pytest.mark.parametrize("case", REWRITTEN)
def test_an_import_is_rewritten_and_the_rest_stays(tmp_path: Path, case: str) -> None:
    before, after = REWRITTEN[case]

    assert written(tmp_path, before) == after


@pytest.mark.parametrize("case", LEFT)
def test_what_has_no_counterpart_is_told_by_line_with_what_to_write(
    tmp_path: Path, case: str
) -> None:
    source, line, name, fix = LEFT[case]
    (tmp_path / "main.py").write_text(source)
    result = invoke(tmp_path, "migrate", "main.py")
    told = [each for each in result.output.splitlines() if each.startswith("main.py:")]

    assert result.exit_code == 1
    assert len(told) == 1
    assert told[0].startswith(f"main.py:{line}:")
    assert name in told[0]
    assert fix in told[0]
    written(tmp_path, source)


def test_the_lines_told_by_a_write_are_those_of_the_file_as_it_is_now(tmp_path: Path) -> None:
    source = "import ray\nfrom ray import (\n    serve,\n)\nray.get(1)\n"
    (tmp_path / "main.py").write_text(source)
    assert "main.py:5:1: `ray.get`" in invoke(tmp_path, "migrate", "main.py").output
    assert "main.py:3:1: `ray.get`" in invoke(tmp_path, "migrate", "main.py", "--write").output

    assert (tmp_path / "main.py").read_text().splitlines()[2] == "ray.get(1)"


@pytest.mark.parametrize("case", KEPT)
def test_a_name_that_is_used_in_any_other_way_keeps_its_import(tmp_path: Path, case: str) -> None:
    source = f"from ray import serve\n{KEPT[case].lstrip()}\n"
    (tmp_path / "main.py").write_text(source)
    result = invoke(tmp_path, "migrate", "main.py", "--write")
    new = (tmp_path / "main.py").read_text()

    assert new.startswith("import ingress as serve\n")
    assert exported(new) == exported(source)
    assert re.search(r"import .*\bray\b", new)
    assert result.exit_code == 1
    assert re.search(r"^main\.py:\d+:\d+: `", result.output, re.MULTILINE)
    assert rewritten(new).text == new


OTHERS = {
    "no GPU": "from ray import serve\nserve.deployment(ray_actor_options={'num_gpus': 0})",
    "options by a name": "from ray import serve\nserve.deployment(ray_actor_options=OPTIONS)",
    "globals": "import ray, ray.serve\nglobals()['log'](1)",
    "modules": "import sys, ray, ray.serve\n'numpy' in sys.modules and sys.modules['numpy']",
    "logger": "import ray, ray.serve, logging\nlogging.getLogger('ray.serve')",
    "text": "import ray, ray.serve\n'ray', 'use ray.get', 'docs.ray.io'",
    "vars": "import ray, ray.serve\nvars(log), dir(log), eval('1'), log.eval",
}


@pytest.mark.parametrize("case", OTHERS)
def test_an_import_goes_where_only_other_names_are_used(case: str) -> None:
    new = rewritten(OTHERS[case])

    assert not re.search(r"import .*\bray\b", new.text)
    assert new.findings == []


def test_an_import_that_another_file_imports_stays(tmp_path: Path) -> None:
    source = "import ray\nfrom ray import serve\n"
    (tmp_path / "compat.py").write_text(source)
    (tmp_path / "main.py").write_text("from compat import (\n    ray,\n)\n")
    result = invoke(tmp_path, "migrate", ".", "--write")

    assert (tmp_path / "compat.py").read_text() == "import ray\nimport ingress as serve\n"
    assert "compat.py:1:8: `ray`: another file may import it" in result.output


def test_names_without_a_counterpart_stay_in_an_import_of_their_own(tmp_path: Path) -> None:
    source = "from ray import (\n    get,  # answers\n    serve,  # to serve\n)\nget(1)\n"

    assert written(tmp_path, source) == (
        "from ray import (\n    get,  # answers\n)\nimport ingress as serve  # to serve\nget(1)\n"
    )


def test_an_import_of_ray_stays_while_something_uses_it(tmp_path: Path) -> None:
    source = "import ray.serve\nray.serve.run(ray.get(1))\n"

    assert written(tmp_path, source) == "import ingress\nimport ray\ningress.run(ray.get(1))\n"


def test_without_write_nothing_changes_and_the_difference_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "main.py"
    path.write_text("from ray import serve\n")
    result = invoke(tmp_path, "migrate", ".")

    assert result.exit_code == 0
    assert "-from ray import serve\n+import ingress as serve\n" in result.output
    assert result.output.endswith("1 file to change, no findings for your hand.\n")
    assert path.read_text() == "from ray import serve\n"


def test_encoding_mode_and_last_line_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "main.py"
    path.write_bytes("# coding: latin-1\nfrom ray import serve\nx = 'é'".encode("latin-1"))
    path.chmod(0o750)
    marked = tmp_path / "marked.py"
    marked.write_bytes(b"\xef\xbb\xbffrom ray import serve\n")
    invoke(tmp_path, "migrate", ".", "--write")

    new = "# coding: latin-1\nimport ingress as serve\nx = 'é'"
    assert path.read_bytes() == new.encode("latin-1")
    assert path.stat().st_mode & 0o777 == 0o750
    assert marked.read_bytes() == b"\xef\xbb\xbfimport ingress as serve\n"


def test_a_file_is_written_in_place(tmp_path: Path) -> None:
    path, other = tmp_path / "main.py", tmp_path / "other"
    path.write_text("from ray import serve\n")
    path.chmod(0o640)
    other.hardlink_to(path)
    before = path.stat()
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        before = path.stat()
    assert invoke(tmp_path, "migrate", "main.py", "--write").exit_code == 0
    after = path.stat()

    assert other.read_text() == "import ingress as serve\n"
    for name in ("st_ino", "st_mode", "st_uid", "st_gid", "st_nlink"):
        assert getattr(after, name) == getattr(before, name)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["main.py", "other"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs Unix")
def test_a_write_that_fails_loses_nothing(tmp_path: Path) -> None:
    import resource

    source = "import ray.serve\nray.get(1)\n" + "# more\n" * 1000  # longer afterwards
    (tmp_path / "main.py").write_text(source)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(source), hard))
    try:
        result = invoke(tmp_path, "migrate", "main.py", "--write")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert "main.py:1: cannot be read or written: File too large" in result.output
    assert (tmp_path / "main.py").read_text() == source
    assert [each.name for each in tmp_path.iterdir()] == ["main.py"]


def test_a_comment_never_becomes_the_encoding(tmp_path: Path) -> None:
    source = "import ray\n# coding: latin-1\nimport ingress\n'é'\n"
    (tmp_path / "main.py").write_text(source, "utf-8")
    result = invoke(tmp_path, "migrate", "main.py", "--write")

    assert "a comment would become its encoding" in result.output
    assert (tmp_path / "main.py").read_text("utf-8") == source


UNUSUAL = {
    "cookie": b"# coding: latin-1\nimport ray\nx = '\xe9'",
    "mark": b"\xef\xbb\xbfimport ray\r\nray.init()\r\n",
    "newlines": b"import os, ray\rprint('a')\r\nprint('b')\n",
    "without": b"\r\n\x0cx = 1\r",
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_a_file_without_ray_serve_is_not_touched(tmp_path: Path, case: str) -> None:
    path = tmp_path / "main.py"
    path.write_bytes(UNUSUAL[case])
    os.utime(path, ns=(1, 1))
    result = invoke(tmp_path, "migrate", "main.py", "--write")

    assert "no files changed" in result.output
    assert path.read_bytes() == UNUSUAL[case]
    assert path.stat().st_mtime_ns == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs Unix")
def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "main.py")
    result = invoke(tmp_path, "migrate", "main.py", "--write")

    assert result.exit_code == 2
    assert "'main.py' is no regular file; name a file or a folder" in result.output


def test_a_notebook_says_that_it_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "main.ipynb").write_text('{"cells": ["from ray import serve"]}')
    result = invoke(tmp_path, "migrate", "main.ipynb")

    assert result.exit_code == 1
    assert "main.ipynb:1: it is a notebook, which is not read; " in result.output


def test_a_file_that_cannot_be_parsed_is_named_with_its_line_and_left(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("from ray import serve\ndef (:\n")
    (tmp_path / "good.py").write_text("from ray import serve\n")
    result = invoke(tmp_path, "migrate", ".", "--write")

    assert result.exit_code == 1
    assert "bad.py:2: cannot be parsed" in result.output
    assert (tmp_path / "bad.py").read_text() == "from ray import serve\ndef (:\n"
    assert (tmp_path / "good.py").read_text() == "import ingress as serve\n"


def test_links_environments_and_hidden_folders_are_left(tmp_path: Path) -> None:
    source = "from ray import serve\n"
    outside = tmp_path / "outside"
    folder = tmp_path / "folder"
    left = [outside, *(folder / name for name in (".git", ".venv", "node_modules", "own"))]
    for each in left:
        each.mkdir(parents=True)
        (each / "main.py").write_text(source)
    (folder / "own" / "pyvenv.cfg").touch()
    os.symlink(outside, folder / "linked")
    os.symlink(outside / "main.py", folder / "linked.py")
    (folder / "main.py").write_text(source)
    invoke(tmp_path, "migrate", "folder", "--write")

    assert [(each / "main.py").read_text() for each in left] == [source] * len(left)
    assert (folder / "linked.py").is_symlink()
    assert (folder / "main.py").read_text() == "import ingress as serve\n"


def test_json_is_one_object(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("import ray\nfrom ray import serve\nray.get(1)\n")
    result = invoke(tmp_path, "migrate", ".", "--json")
    told: dict[str, Any] = json.loads(result.output)

    assert (told["written"], told["files"], len(told["changed"])) == (False, 1, 1)
    [finding] = told["findings"]
    assert (finding["path"], finding["line"], finding["name"]) == ("main.py", 3, "ray.get")


def test_ray_is_started_while_other_code_uses_it() -> None:
    source = "import ray.serve\nray.init()\nray.serve.run(ray.get(1))\n"
    new = rewritten(source)

    assert new.text == "import ingress\nimport ray\nray.init()\ningress.run(ray.get(1))\n"
    assert [each.name for each in new.findings] == ["ray.init", "ray.get"]


@pytest.mark.parametrize("arguments", [["no/such.py"], ["."], [""], []])
def test_a_wrong_argument_is_told_and_exits_with_2(tmp_path: Path, arguments: list[str]) -> None:
    assert invoke(tmp_path, "migrate", *arguments).exit_code == 2


@pytest.mark.parametrize("module", [each for each in PATHS if each.split(".")[1] in advice.MODULES])
def test_the_names_of_a_public_path_are_counterparts(module: str) -> None:
    name = module.split(".")[1]
    others = {"serving_until_signal"}  # which only ingress has

    assert [
        n for n in PATHS[module] if n not in others and advice.target([name], n) != module
    ] == []


def test_the_command_line_names_this_command_for_a_program_of_ray_serve(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("import os\nfrom ray.serve import batch\n")
    result = run_ingress(tmp_path, "run", "shop:app")

    assert result.returncode == 1
    assert re.search(r"shop\.py:2: No module named 'ray'.*`ingress migrate FILE`", result.stderr)


def test_a_migrated_file_serves(tmp_path: Path) -> None:
    source = """
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

@serve.deployment
class Child:
    async def __call__(self, text: str) -> str:
        return text.upper()

@serve.deployment
class Main:
    def __init__(self, child: DeploymentHandle):
        self.child = child
    async def __call__(self, request) -> str:
        return await self.child.remote(request.query_params["text"])

app = Main.bind(Child.bind())
"""
    (tmp_path / "shop.py").write_text(source)
    assert invoke(tmp_path, "migrate", "shop.py", "--write").exit_code == 0

    with ingress_run(tmp_path, "shop:app") as server:
        wait_until(lambda: "is ready at" in server.output)
        answer = httpx.get(server.url, params={"text": "tea"}, timeout=60)

    assert answer.text == "TEA"


PIECES = [
    *("import ray", "import ray.serve", "from ray import serve", "import ray as r, os"),
    *("from ray.serve import batch, llm", "from ray import get, serve as s", "ray.serve.run(1)"),
    *("ray.get(ray)", "x = r.serve.handle.DeploymentHandle", "def f(ray): ray.serve", "'é'; serve"),
    *("try: import ray\nexcept ImportError: ray = None", "if 1: import ray; import ray.serve"),
    *("f'{ray.serve.run}é{ray.serve.llm}'", "class A:\n  import ray\n  b = ray.serve.batch", ""),
]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(PIECES), max_size=8), st.sampled_from(["\n", "\r\n"]))
def test_a_second_run_changes_nothing_and_finds_the_same(pieces: list[str], newline: str) -> None:
    first = rewritten("\n".join(pieces).replace("\n", newline))
    second = rewritten(first.text)

    ast.parse(first.text)
    assert second.text == first.text
    assert sorted((each.name, each.fix) for each in second.findings) == sorted(
        (each.name, each.fix) for each in first.findings
    )


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_a_random_module_uses_no_name_that_is_not_bound_and_does_the_same() -> None:
    random, ran = Random(1), 0
    for _ in range(400):
        source = random_module(random)
        try:
            compile(source, "program", "exec")
        except SyntaxError:  # as of a name that is both a parameter and global
            continue
        new = rewritten(source)
        assert rewritten(new.text).text == new.text
        assert unbound(new.text) <= unbound(source), source
        try:
            done = exported(source)
        except Exception:  # as of a name that is not bound yet
            continue
        assert exported(new.text) == done, source
        ran += 1
    assert ran > 50
