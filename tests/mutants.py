"""Mutation run: small changes of the code, of which the tests that execute the changed function must notice each.

``python -m tests.mutants --mutants 500`` or ``make mutants MUTANTS=500``. Cosmic Ray lists and makes the changes; this
program draws some of them, uniformly over the places in the code, and runs the tests. First it runs all tests of the
chosen modules and records which functions each test calls. Then each mutant is run, quickest test first, in a process
forked from one that has imported the large libraries, in a copy of the project.

Tests that call a function in another process only are not found by this, so a survivor may have a test there.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROPERTIES = "tests/properties"
TARGETS: dict[str, tuple[str, ...]] = {
    "samplebatch/buffer": (
        "tests/buffer",
        f"{PROPERTIES}/test_buffer_machine.py",
        f"{PROPERTIES}/test_buffer_vs_tianshou.py",
        "tests/clients/test_tianshou_names.py",
    ),
    "samplebatch/batch": (
        "tests/batch",
        f"{PROPERTIES}/test_batch_laws.py",
        f"{PROPERTIES}/test_batch_chains.py",
        f"{PROPERTIES}/test_batch_vs_rllib.py",
        f"{PROPERTIES}/test_batch_vs_tianshou.py",
        "tests/test_looking.py",
    ),
    "samplebatch/returns": (
        "tests/test_returns.py",
        "tests/test_returns_of_rows.py",
        "tests/test_vtrace.py",
        "tests/buffer/test_n_step.py",
        "tests/rollout/test_postprocessing.py",
    ),
    "samplebatch/column/casting.py": ("tests/column", "tests/rollout/test_exact_conversion.py"),
}
"""Modules that are mutated, and their tests; the examples of their docstrings are run as well."""
PRELOADED = ("hypothesis", "numba", "numpy", "pyarrow.parquet", "torch")
"""What each mutant's process has imported before it is forked; nothing of the project."""
COPIED = ("samplebatch", "tests", "benchmarks", "docs", "pyproject.toml")
LEAST_TIMEOUT_S = 60.0
Call = tuple[str, int]
"""A function: its file, and the line where its code begins."""


@dataclass
class Case:
    """Test that ran without mutants."""

    name: str
    seconds: float
    calls: set[Call]


@dataclass
class Mutant:
    """Change of one file and its outcome."""

    path: str
    line: int
    function: str
    operator: str
    code: str
    changed: tuple[str, str]
    tests: list[Case] = field(default_factory=list)
    outcome: str = ""

    def __str__(self) -> str:
        before, after = (text.strip() for text in self.changed)
        return f"{self.path}:{self.line} {self.function} ({self.outcome})\n    - {before}\n    + {after}"


# The code


@cache
def functions_of(path: str) -> list[tuple[int, int, int, str]]:
    """List the functions of a file: first line, line of `def`, last line, name; inner functions follow outer ones."""
    actual = []
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            actual.append((first, node.body[0].lineno, node.end_lineno or node.lineno, node.name))
    return sorted(actual)


@cache
def unexecuted_spans(path: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """List code that only type checkers read: annotations, and imports under `TYPE_CHECKING`."""
    nodes: list[ast.AST | None] = []
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes.append(node.returns)
        elif isinstance(node, ast.arg | ast.AnnAssign):
            nodes.append(node.annotation)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes.append(node)
    return [
        ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))  # type: ignore[attr-defined]
        for node in nodes
        if node is not None
    ]


def function_at(path: str, line: int) -> tuple[Call, str] | None:
    """Find the innermost function whose body contains a line."""
    around = [part for part in functions_of(path) if part[1] <= line <= part[2]]
    return ((path, around[-1][0]), around[-1][3]) if around else None


def draw_mutants(modules: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Draw mutants uniformly over the code positions that can be changed, and over the changes of a position."""
    init = import_module("cosmic_ray.commands.init").init
    mutate = import_module("cosmic_ray.mutating").mutate_code
    operators = import_module("cosmic_ray.plugins").get_operator
    use_db = import_module("cosmic_ray.work_db").use_db
    places: dict[tuple[str, tuple[int, int]], list[Any]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, use_db(Path(folder) / "session.sqlite") as session:
        init([ROOT / module for module in modules], session, {})
        for item in session.work_items:
            (spec,) = item.mutations
            path = str(spec.module_path.relative_to(ROOT))
            start = tuple(spec.start_pos)
            if not any(begin <= start < end for begin, end in unexecuted_spans(path)):
                places[path, start].append(spec)
    rng = random.Random(seed)
    mutants: list[Mutant] = []
    order = sorted(places)
    rng.shuffle(order)
    for path, start in order:
        if len(mutants) == count:
            break
        specs = places[path, start]
        spec = specs[rng.randrange(len(specs))]
        before = (ROOT / path).read_text()
        try:
            code = mutate(before, operators(spec.operator_name)(**spec.operator_args), spec.occurrence)
        except AttributeError:
            # Cosmic Ray 8.7 cannot replace an exception with a dotted name.
            continue
        if code is None or code == before:
            continue
        pairs = zip(before.splitlines(), code.splitlines(), strict=False)
        changed = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
        actual = function_at(path, start[0])
        mutants.append(Mutant(path, start[0], actual[1] if actual else "", spec.operator_name, code, changed))
    return mutants


# The tests


class Recorder:
    """Plugin that records, for each test, the called functions of the mutated files and the duration."""

    def __init__(self, folder: Path, prefixes: Sequence[str]) -> None:
        self.tests: list[Case] = []
        self._codes: set[CodeType] = set()
        self._prefixes = tuple(str(folder / prefix) for prefix in prefixes)
        self._folder = folder

    def _trace(self, frame: FrameType, event: str, arg: object) -> None:
        self._codes.add(frame.f_code)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._codes = set()
        began = time.monotonic()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            calls = {
                (str(Path(code.co_filename).relative_to(self._folder)), code.co_firstlineno)
                for code in self._codes
                if code.co_filename.startswith(self._prefixes)
            }
            self.tests.append(Case(item.nodeid, time.monotonic() - began, calls))


class Selector:
    """Plugin that selects tests in a given order."""

    def __init__(self, names: Sequence[str]) -> None:
        self._places = {name: position for position, name in enumerate(names)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._places), key=lambda item: self._places[item.nodeid]
        )


def start(folder: Path, arguments: Sequence[str], plugin: Any, result: Path | None = None) -> int:
    """Fork a process that runs tests in a copy of the project; return its id."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    status = 70
    try:
        quiet = os.open(os.devnull, os.O_RDWR)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number, target in ((0, quiet), (1, log), (2, log)):
            os.dup2(target, number)
        os.chdir(folder)
        sys.path[:] = [str(folder), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
        os.environ["PYTHONPATH"] = str(folder)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("samplebatch", "tests", "benchmarks")]:
            if name != __name__:
                del sys.modules[name]
        options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--doctest-modules", "--assert=plain"]
        status = int(pytest.main([*options, *arguments], plugins=[plugin]))
        if result is not None:
            lines = [[test.name, test.seconds, sorted(test.calls)] for test in plugin.tests]
            result.write_text(json.dumps(lines))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def copy_project(folder: Path) -> Path:
    """Copy the files that tests require into a new folder."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def record(folder: Path, targets: Sequence[str]) -> list[Case]:
    """Run all tests of some targets without a mutant, and return which functions they call."""
    paths = dict.fromkeys(path for target in targets for path in (*TARGETS[target], target))
    result = folder / "record.json"
    pid = start(folder, [*paths], Recorder(folder, targets), result)
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"tests must pass without a mutant:\n{(folder / 'log').read_text()[-3000:]}")
    actual = json.loads(result.read_text())
    return [Case(name, seconds, {(path, line) for path, line in calls}) for name, seconds, calls in actual]


def choose_tests(mutant: Mutant, tests: Sequence[Case]) -> list[Case]:
    """Select the tests that call the changed function, fastest first; outside functions, all tests of the file."""
    actual = function_at(mutant.path, mutant.line)
    if actual is None:
        chosen = [test for test in tests if any(path == mutant.path for path, _ in test.calls)]
    else:
        chosen = [test for test in tests if actual[0] in test.calls]
    return sorted(chosen, key=lambda test: test.seconds)


def run_all(mutants: Sequence[Mutant], folders: Sequence[Path]) -> Iterator[Mutant]:
    """Run several mutants concurrently, each in one of the folders; yield finished mutants."""
    waiting, free = list(reversed(mutants)), list(folders)
    running: dict[int, tuple[Mutant, Path, float]] = {}
    # A changed file must not be taken for the one before, whose compiled form has the same second and size.
    stamp = int(time.time())
    while waiting or running:
        while waiting and free:
            mutant = waiting.pop()
            if not mutant.tests:
                mutant.outcome = "no test"
                yield mutant
                continue
            folder, stamp = free.pop(), stamp + 1
            (folder / mutant.path).write_text(mutant.code)
            os.utime(folder / mutant.path, (stamp, stamp))
            files = dict.fromkeys(test.name.partition("::")[0] for test in mutant.tests)
            pid = start(folder, [*files], Selector([test.name for test in mutant.tests]))
            timeout_s = LEAST_TIMEOUT_S + 5 * sum(test.seconds for test in mutant.tests)
            running[pid] = (mutant, folder, time.monotonic() + timeout_s)
        pid, status = os.waitpid(-1, os.WNOHANG) if running else (0, 0)
        overdue = [part for part, (_, _, end) in running.items() if time.monotonic() > end]
        if pid in running:
            code = os.waitstatus_to_exitcode(status)
            outcome = {0: "survived", 5: "no test"}.get(code, "killed")
        elif overdue:
            pid, outcome = overdue[0], "timed out"
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        else:
            time.sleep(0.05)
            continue
        mutant, folder, _ = running.pop(pid)
        mutant.outcome = outcome
        shutil.copy(ROOT / mutant.path, folder / mutant.path)
        stamp += 1
        os.utime(folder / mutant.path, (stamp, stamp))
        free.append(folder)
        yield mutant


def report(mutants: Sequence[Mutant]) -> str:
    """List the mutants that no test detected, and count the outcomes in each file."""
    lines = [str(mutant) for mutant in mutants if mutant.outcome in ("survived", "no test")]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant in mutants:
        counts[mutant.path][mutant.outcome] += 1
        counts["all"][mutant.outcome] += 1
    outcomes = ("killed", "timed out", "survived", "no test")
    width = max(map(len, counts))
    lines += ["", f"{'':{width}}" + "".join(f"{outcome:>11}" for outcome in outcomes)]
    for path, part in sorted(counts.items(), key=lambda pair: (pair[0] == "all", pair[0])):
        lines.append(f"{path:{width}}" + "".join(f"{part[outcome]:>11}" for outcome in outcomes))
    return "\n".join(lines)


def main() -> None:
    """Draw and run mutants; print the survivors."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; all if none")
    parser.add_argument("--mutants", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="a file for the outcomes")
    options = parser.parse_args()
    targets = options.targets or [*TARGETS]
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    for module in PRELOADED:
        import_module(module)
    modules = [
        str(path.relative_to(ROOT))
        for target in targets
        for path in ([ROOT / target] if target.endswith(".py") else sorted((ROOT / target).rglob("*.py")))
        if path.name != "__init__.py"
    ]
    mutants = draw_mutants(modules, options.mutants, options.seed)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        folders = [copy_project(Path(folder) / str(number)) for number in range(options.processes)]
        print(f"{len(mutants)} mutants of {len(modules)} modules; running their tests without a mutant", flush=True)
        tests = record(folders[0], targets)
        for mutant in mutants:
            mutant.tests = choose_tests(mutant, tests)
        for number, mutant in enumerate(run_all(mutants, folders), 1):
            text = mutant if mutant.outcome in ("survived", "no test") else f"{mutant.path}:{mutant.line}"
            print(f"{number}/{len(mutants)} {mutant.outcome:9} {text}", flush=True)
    print(report(mutants))
    if options.json is not None:
        names = ("path", "line", "function", "operator", "changed", "outcome")
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps([{name: getattr(part, name) for name in names} for part in mutants], indent=1)
        )


if __name__ == "__main__":
    main()
