"""Foreign bytes are unpickled in one module, which requires permission; other code execution is listed here."""

from __future__ import annotations

import ast
import io
import pickle
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.unpickling import unpickle
from samplebatch.errors import FormatError, UntrustedPickleError
from samplebatch.policy.source import load_policy
from samplebatch.storage.buffers.state import buffer_class
from tests.malice import MaliciousColumn, Mark

PACKAGE = Path(__file__).parents[1] / "samplebatch"

ALLOWED = {
    "pickle.loads": {
        "column/unpickling.py": "the one place that decides",
        "transport/shared_pickling.py": "what multiprocessing itself unpickles, in two parts",
        "policy/source.py": "bytes that the parent process has pickled",
        "workers/ray_backend.py": "what the actors and the learner of one run have pickled for each other",
        "env/async_vector.py": "requests of the parent process, and answers of the processes of its environments",
    },
    "pickle.Unpickler": {
        "batch/inert_pickle.py": "one that finds stubs in place of classes",
        "env/environment_state.py": "environments in the state of a collector, if the caller allows it",
    },
    "np.load": {"batch/view_requirement.py": "bounds of spaces, with pickles refused"},
    "torch.load": {
        "policy/source.py": "with weights only, unless the caller allows more",
        "learn/checkpoint.py": "with weights only: pickled objects in it go through the one place",
    },
    "torch.export.load": {"policy/source.py": "if the caller allows it"},
    "importlib.import_module": {
        "exports.py": "modules that the library's own packages import names from",
        "errors.py": "packages that the library names",
        "policy/source.py": "names that a Python argument or the command line gives",
        "env/registry.py": "names that a Python argument, the command line, or with permission a file gives",
        "env/async_vector.py": "cloudpickle",
        "env/environment_state.py": "cloudpickle",
        "convert/tianshou.py": "Tianshou's modules, out of a table",
        "storage/buffers/tianshou.py": "Tianshou's modules, out of a table, when a pickle of the user's is loaded",
        "storage/buffers/state.py": "modules of buffers, out of a table",
        "buffer/__init__.py": "modules that pickles of older versions name otherwise, out of a table",
        "transport/region.py": "a module of Python's",
        "env/seeds.py": "torch",
        "loggers/logger.py": "the reader of TensorBoard's logs",
    },
    "exec": {"buffer/table.py": "a function of constant text and numbers: names and values are variables"},
    "compile": {
        "learn/ppo.py": "an argument of this name: torch.compile gets a function of the library",
        "learn/sac.py": "an argument of this name: torch.compile gets a function of the library",
    },
}
"""Calls that run code or read it, and the only modules that make them."""

TRUSTED = {
    "column/interface.py": "whoever unpickles a column runs its pickle already",
    "batch/frame.py": "whoever unpickles a batch runs its pickle already",
    "storage/datasets/parts.py": "columns that are shown have no rows, and so nothing to unpickle",
    "workers/backend.py": "workers are processes of the user's own code",
    "workers/ray_backend.py": "actors are processes of the user's own code, and run what their learner has pickled",
    "workers/task.py": "a worker loads the state that its parent was allowed to",
}
"""The only modules that allow unpickling themselves, in place of handing a permission down."""


# -- policies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False])
def test_modules_in_files_are_not_unpickled(zipped: bool, mark: Path, tmp_path: Path) -> None:
    import torch

    path = tmp_path / "policy.pt"
    torch.save({"weight": Mark(mark)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UntrustedPickleError, match=r"policy\.pt"):
        load_policy(path)


def test_programs_in_files_are_not_unpickled(mark: Path, tmp_path: Path) -> None:
    import torch

    full, path, inputs = tmp_path / "whole.pt2", tmp_path / "policy.pt2", io.BytesIO()
    torch.export.save(torch.export.export(torch.nn.Linear(4, 2), (torch.zeros(3, 4),)), full)
    torch.save(Mark(mark), inputs)
    with zipfile.ZipFile(full) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, inputs.getvalue() if "sample_inputs" in name else source.read(name))
    with pytest.raises(UntrustedPickleError, match=r"policy\.pt2"):
        load_policy(path)


def test_checkpoints_are_loaded_by_torch_without_executing_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    from samplebatch.learn.checkpoint import FILE, read_checkpoint

    torch.save({"trainer": "x", "parts": {}, "why_reset": None}, tmp_path / FILE)
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    with pytest.raises(UntrustedPickleError, match=r"checkpoint\.pt' may execute code when torch 2\.5\.1\+cpu"):
        read_checkpoint(tmp_path)
    assert read_checkpoint(tmp_path, allow_pickle=True)["trainer"] == "x"


# -- names -------------------------------------------------------------------------------------------------------------


def test_a_buffer_of_an_unknown_class_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("evil", "evil:ReplayBuffer", "evil.ReplayBuffer", "..evil", "os"):
        with pytest.raises(FormatError, match="the buffer must be a ReplayBuffer"):
            buffer_class(name, ReplayBuffer)


# -- the one place -----------------------------------------------------------------------------------------------------


def test_no_pickle_is_read_without_permission(mark: Path) -> None:
    def pickles() -> Iterator[bytes]:
        raise AssertionError("a pickle was looked at")
        yield b""

    with pytest.raises(UntrustedPickleError, match="column 'a' holds"):
        unpickle(pickles(), "column 'a'")
    assert unpickle([pickle.dumps(3)], "column 'a'", allow_pickle=True) == [3]
    with pytest.raises(FormatError, match="column 'a' must"):
        unpickle([b"garbage"], "column 'a'", allow_pickle=True)


def test_loading_a_column_rejects_pickles_by_default(mark: Path) -> None:
    header, buffers = MaliciousColumn.of("root", mark).dump()
    with pytest.raises(UntrustedPickleError):
        ObjectColumn.load(header, buffers)


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """List the name nodes of every module's syntax tree, with the path of the module."""
    kinds = ast.Attribute | ast.Name | ast.ImportFrom | ast.keyword | ast.FunctionDef
    return [
        (path.relative_to(PACKAGE).as_posix(), node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds)
    ]


def dotted(node: ast.AST) -> list[str]:
    """List the dotted names that a node represents."""
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Attribute):
        return [f"{inner}.{node.attr}" for inner in dotted(node.value)]
    return [node.id] if isinstance(node, ast.Name) else []


DANGEROUS = frozenset((
    "pickle.loads", "pickle.load", "pickle.Unpickler", "_pickle.loads", "torch.load", "torch.jit.load",
    "torch.export.load", "np.load", "numpy.load", "marshal.loads", "marshal.load", "shelve.open", "cloudpickle.loads",
    "dill.loads", "joblib.load", "yaml.load", "eval", "exec", "compile", "__import__", "runpy.run_path",
    "ForkingPickler.loads", "os.system", "importlib.import_module", "importlib.reload", "pkgutil.resolve_name",
))  # fmt: skip


def test_code_is_loaded_only_in_the_listed_modules() -> None:
    actual: dict[str, set[str]] = {}
    for module, node in nodes():
        for name in DANGEROUS.intersection(dotted(node)):
            actual.setdefault(name, set()).add(module)
    assert actual == {name: set(modules) for name, modules in ALLOWED.items()}


def test_only_the_listed_modules_allow_unpickling() -> None:
    actual = {
        module
        for module, node in nodes()
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle"
        if isinstance(node.value, ast.Constant) and node.value.value
    }
    assert actual == set(TRUSTED)


def test_permissions_are_rejected_by_default() -> None:
    for module, node in nodes():
        if isinstance(node, ast.FunctionDef):
            names = [part.arg for part in node.args.kwonlyargs]
            default = dict(zip(names, node.args.kw_defaults, strict=True)).get("allow_pickle", ast.Constant(False))
            assert isinstance(default, ast.Constant), (module, node.name)
            assert default.value is False, (module, node.name)
