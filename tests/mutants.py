"""Mutation testing: one defect at a time is put into `ingress`, and a test must find it.

    python -m tests.mutants SEED COUNT [FOLDER]

The seed draws COUNT mutants, spread over the rooms (the folders of `ingress/`) by their numbers of
statements. The first run measures the lines that each test executes, in processes too. A mutant is
written into a copy of the tree. The tests of its line run, those of its module and its room first,
until one fails or hangs, or `SPENT_S` are planned. `FOLDER/results-SEED.jsonl` (in `build/mutants`
by default) has a line for each mutant; a later run continues it. A mutant that `passed` may yet be
found by a long test, or by tests that were not planned. After a change of the code, remove
the folder.

Not changed: texts, annotations, decorators, `raise`, `__slots__`, and `engines/ray`, whose tests
need Ray.
"""

from __future__ import annotations

import ast
import copy
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import pytest
from coverage import Coverage, CoverageData

from tests.programs import ROOT

AT_A_TIME = 2
SPENT_S, FILE_S = 30.0, 0.5
SECONDS: dict[str, float] = {}
MEASURE = (
    "-p",
    "tests.mutants",
    "-n",
    "3",
    "--dist",
    "loadfile",
    "-m",
    "not thorough and not long",
)
RC = """[run]
parallel = true
data_file = {0}/lines
include = {0}/tree0/ingress/*
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected, module-not-measured, already-imported
"""
PAIRS: list[tuple[type[ast.AST], type[ast.AST]]] = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)),
    *((ast.In, ast.NotIn), (ast.And, ast.Or), (ast.Break, ast.Continue)),
    *((ast.FloorDiv, ast.Mult), (ast.Mod, ast.Mult), (ast.Div, ast.Mult), (ast.Add, ast.Sub)),
]
SWAPPED = {of: to for pair in PAIRS for of, to in (pair, pair[::-1])}


class Mutant(NamedTuple):
    """One change of a module: its bytes from `start` to `end` become `text`."""

    path: str
    first: int
    last: int
    start: int
    end: int
    text: str
    in_function: bool


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Record lines for this test from now on; a process that it starts does so by `RC`."""
    if measured := Coverage.current():
        measured.switch_context(item.nodeid)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    seconds = report.duration if report.passed else math.inf
    SECONDS[report.nodeid] = SECONDS.get(report.nodeid, 0) + seconds


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Save the lines: pytest-xdist ends its processes without the functions of `atexit`."""
    if measured := Coverage.current():
        measured.stop()
        measured.save()
    if not hasattr(session.config, "workerinput"):
        passed = {each: SECONDS[each] for each in SECONDS if SECONDS[each] < math.inf}
        Path(os.environ["MUTANTS_SECONDS"]).write_text(json.dumps(passed))


def replacements(node: ast.AST, in_function: bool) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield parts of a node, each with its replacement."""
    match node:
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                yield node, changed(node, ops=[*ops[:at], SWAPPED[type(op)](), *ops[at + 1 :]])
        case ast.BoolOp(op=op):
            yield node, changed(node, op=SWAPPED[type(op)]())
        case ast.BinOp(left, op, right) if type(op) in SWAPPED and not is_text(left, right):
            yield node, changed(node, op=SWAPPED[type(op)]())
        case ast.If(test=test) | ast.IfExp(test=test):
            match test:
                case ast.UnaryOp(ast.Not(), operand):
                    yield test, operand
                case _:
                    yield test, ast.UnaryOp(ast.Not(), test)
        case ast.Constant(value=bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(value=int(0 | 1 as value)):
            yield node, ast.Constant(1 - value)
        case ast.Return(value=ast.expr() as value) if getattr(value, "value", value) is not None:
            yield node, ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call() | ast.Await()) | ast.Assign() | ast.AugAssign() if in_function:
            yield node, ast.Pass()
        case ast.AnnAssign(value=ast.expr()) if in_function:
            yield node, ast.Pass()
        case ast.Break() | ast.Continue():
            yield node, SWAPPED[type(node)]()


def changed(node: ast.AST, **fields: object) -> ast.AST:
    made = copy.copy(node)
    vars(made).update(fields)
    return made


def is_text(*nodes: ast.AST) -> bool:
    return any(
        isinstance(each, ast.JoinedStr | ast.Constant)
        and isinstance(getattr(each, "value", ""), str)
        for node in nodes
        for each in ast.walk(node)
    )


def below(node: ast.AST, in_function: bool = False) -> Iterator[tuple[ast.AST, ast.AST, bool]]:
    """Yield all replacements in a tree, and whether each is in a function."""
    for part, new in replacements(node, in_function):
        yield part, new, in_function
    for name, value in ast.iter_fields(node):
        match node, name:
            case (ast.Raise() | ast.JoinedStr(), _) | (_, "annotation" | "returns"):
                continue
            case (_, "decorator_list") | (ast.ClassDef(), "keywords" | "bases"):
                continue
            case (ast.If(test=ast.Name("TYPE_CHECKING")), "body"):
                continue
            case (ast.Assign(targets=[ast.Name("__slots__" | "__all__")]), _):
                continue
        is_body = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and name == "body"
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST):
                yield from below(each, in_function or is_body)


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield all mutants of a module; each keeps the numbers of the lines after it."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, new, in_function in below(ast.parse(source)):
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno and node.end_col_offset  # noqa: PT018
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        text = ast.unparse(ast.fix_missing_locations(new)) + "\n" * (node.end_lineno - node.lineno)
        text = f"({text})" if isinstance(new, ast.expr) else text
        relative = path.relative_to(ROOT).as_posix()
        yield Mutant(relative, node.lineno, node.end_lineno, start, end, text, in_function)


def drawn(seed: int, count: int) -> list[Mutant]:
    """Return the mutants of a seed."""
    rooms: dict[Path, list[Mutant]] = defaultdict(list)
    statements: Counter[Path] = Counter()
    for path in sorted((ROOT / "ingress").rglob("*.py")):
        if not path.is_relative_to(ROOT / "ingress/engines/ray"):
            rooms[path.parent] += mutants_of(path)
            nodes = ast.walk(ast.parse(path.read_bytes()))
            statements[path.parent] += sum(isinstance(node, ast.stmt) for node in nodes)
    chance = random.Random(seed)
    shares = Counter(chance.sample(list(statements), count, counts=statements.values()))
    found = [each for room, share in shares.items() for each in chance.sample(rooms[room], share)]
    return chance.sample(found, count)


class Tests:
    """The tests that pass, with their seconds, and the lines that each executes."""

    def __init__(self, folder: Path) -> None:
        self._tree = folder / "tree0"
        seconds = folder / "seconds.json"
        if not seconds.exists():
            (folder / "rc").write_text(RC.format(folder))
            env = {"COVERAGE_PROCESS_START": f"{folder}/rc", "MUTANTS_SECONDS": str(seconds)}
            run(copied(self._tree), *MEASURE, env=env)
        self._seconds: dict[str, float] = json.loads(seconds.read_text())
        self._lines = CoverageData(no_disk=True)
        for path in folder.glob("lines.*"):
            part = CoverageData(str(path))
            part.read()
            self._lines.update(part)

    def of(self, mutant: Mutant) -> list[str]:
        """Return the tests of a mutant, in the order in which they run."""
        module = Path(mutant.path)
        folders = [ROOT / "tests" / each for each in module.relative_to("ingress").parents]
        room = next(each for each in folders if each.is_dir()).relative_to(ROOT).as_posix()
        found = self._executing(mutant)
        if not found:
            found = {each for each in self._seconds if each.startswith((room, "tests/cli"))}
        files: dict[str, list[str]] = defaultdict(list)
        for test in sorted(found, key=self._seconds.__getitem__):
            files[test.partition("::")[0]].append(test)

        def place(file: str) -> tuple[bool, bool, float]:
            fastest = self._seconds[files[file][0]]
            return module.stem not in file, not file.startswith(room), fastest

        chosen: list[str] = []
        left = SPENT_S
        for file in sorted(files, key=place):
            left -= FILE_S
            for test in files[file]:
                if self._seconds[test] < left or not chosen:
                    left -= self._seconds[test]
                    chosen.append(test)
        return chosen

    def _executing(self, mutant: Mutant) -> set[str]:
        """Return the tests that execute a line, or the module if the line is in no function."""
        by_line = self._lines.contexts_by_lineno(str(self._tree / mutant.path))
        lines = range(mutant.first, mutant.last + 1) if mutant.in_function else by_line
        found = set()
        for context in {each for line in lines for each in by_line.get(line, ())}:
            of_process = re.fullmatch(r"(.*) \((setup|call|teardown)\)", context)
            found.add(of_process[1] if of_process else context)
            if of_process and of_process[2] == "setup":  # perhaps a server for the whole file
                file = context.partition("::")[0] + "::"
                found |= {each for each in self._seconds if each.startswith(file)}
        return found & self._seconds.keys()


def copied(tree: Path) -> Path:
    ignored = shutil.ignore_patterns(".*", "build", "dist", "__pycache__")
    shutil.rmtree(tree, ignore_errors=True)
    return Path(shutil.copytree(ROOT, tree, ignore=ignored, symlinks=True))


def run(tree: Path, *arguments: str, env: dict[str, str], timeout: float | None = None) -> str:
    """Run pytest in a tree; return `passed`, `hangs`, or the last test that failed."""
    env = os.environ | env | {"PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    with (tree / "output").open("w+") as out, suppress(ProcessLookupError):
        process = subprocess.Popen(
            command, cwd=tree, env=env, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return "hangs"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        failed = [line for line in out if line.startswith(("FAILED", "ERROR"))]
    return [f"code {code}", *failed][-1].strip() if code else "passed"


def tried(number: int, mutant: Mutant, tests: list[str], tree: Path) -> str:
    """Return the outcome of the tests with a mutant."""
    path = tree / mutant.path
    source = path.read_bytes()
    path.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
    os.utime(path, (number, number))  # else Python might take the compiled module of another mutant
    try:
        return run(tree, "-x", "--timeout", "40", *tests, env={}, timeout=3 * SPENT_S + 60)
    finally:
        path.write_bytes(source)


def main(seed: int, count: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    os.nice(10)
    tests = Tests(folder)
    results = folder / f"results-{seed}.jsonl"
    results.touch()
    known = [Mutant(*json.loads(line)["mutant"]) for line in results.read_text().splitlines()]
    trees: SimpleQueue[Path] = SimpleQueue()
    for number in range(AT_A_TIME):
        trees.put(copied(folder / f"tree{number + 1}"))

    def add(number: int, mutant: Mutant, chosen: list[str]) -> None:
        tree = trees.get()
        outcome = tried(number, mutant, chosen, tree)
        trees.put(tree)
        was = (ROOT / mutant.path).read_bytes()[mutant.start : mutant.end].decode()
        line = {"outcome": outcome, "was": was, "tests": len(chosen), "mutant": mutant}
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for number, mutant in enumerate(drawn(seed, count)):
            if mutant not in known:
                pool.submit(add, number, mutant, tests.of(mutant)).add_done_callback(Future.result)
    outcomes = [json.loads(line)["outcome"] for line in results.read_text().splitlines()]
    print(f"{len(outcomes) - outcomes.count('passed')} of {len(outcomes)} mutants were found")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(*sys.argv[3:] or ["build/mutants"]).absolute())
