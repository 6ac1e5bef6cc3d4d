"""Policies by name: functions, classes and files, and what is said where there is none."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from samplebatch.errors import PolicySpecError, UntrustedPickleError
from samplebatch.rollout.named_policy import NamedPolicy


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_policies.py").write_text(
        "import torch\n"
        "def zeros(obs): return obs[:, 0].astype(int) * 0\n"
        "def make(scale=2): return lambda obs: obs * scale\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self): super().__init__(4, 2)\n"
        "number = 3\n"
    )
    (tmp_path / "needs_more.py").write_text("import not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_policies"
    sys.modules.pop("my_policies", None)


def test_a_function_is_the_policy_and_one_without_parameters_makes_it(module: str) -> None:
    obs = np.ones((3, 4))
    assert NamedPolicy(f"{module}:zeros").load()(obs).tolist() == [0, 0, 0]
    assert NamedPolicy(f"{module}:make").load()(obs).tolist() == (2 * obs).tolist()
    assert NamedPolicy(f"{module}:Net").load().weight.shape == (2, 4)


def test_it_goes_to_other_processes_as_its_name(module: str) -> None:
    named = NamedPolicy(f"{module}:Net", allow_pickle=True)
    assert pickle.loads(pickle.dumps(named)) == named
    assert len(pickle.dumps(named)) < 200


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my_policies:zeroes", "did you mean 'zeros'?"),
        ("my_policies:number", "must be callable, and 'my_policies:number' is a int"),
        ("no_such_module:f", "there is no 'no_such_module'"),
        ("my_policies", "must be named as 'random', 'module:function', or a file ending in"),
        (":f", "must be named as"),
        ("nowhere.pt", "'nowhere.pt' is not"),
    ],
)
def test_what_is_not_there_is_named(module: str, name: str, words: str) -> None:
    with pytest.raises(PolicySpecError, match=words.replace("?", r"\?")):
        NamedPolicy(name).load()


def test_an_import_that_fails_within_a_module_is_told_as_it_is(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        NamedPolicy("needs_more:f").load()


def test_an_exported_program_needs_no_trust(tmp_path: Path) -> None:
    import torch

    linear, path = torch.nn.Linear(4, 2), str(tmp_path / "policy.pt2")
    rows = torch.export.Dim.AUTO
    torch.export.save(torch.export.export(linear, (torch.zeros(3, 4),), dynamic_shapes=({0: rows},)), path)
    obs = torch.ones(5, 4)
    assert torch.equal(NamedPolicy(path).load()(obs), linear(obs))


def test_a_pickled_module_is_loaded_only_if_that_is_allowed(tmp_path: Path) -> None:
    import torch

    linear, path = torch.nn.Linear(4, 2), str(tmp_path / "policy.pt")
    torch.save(linear, path)
    with pytest.raises(UntrustedPickleError, match="pickled module"):
        NamedPolicy(path).load()
    assert torch.equal(NamedPolicy(path, allow_pickle=True).load().weight, linear.weight)


def test_files_that_hold_no_policy_are_refused(tmp_path: Path) -> None:
    import torch

    weights, text, program = (str(tmp_path / name) for name in ("weights.pt", "text.pt", "text.pt2"))
    torch.save(torch.nn.Linear(4, 2).state_dict(), weights)
    Path(text).write_text("hello")
    Path(program).write_text("hello")
    with pytest.raises(PolicySpecError, match="holds a OrderedDict; where it holds weights, name a 'module:function'"):
        NamedPolicy(weights).load()
    for path in (text, program):
        with pytest.raises((PolicySpecError, UntrustedPickleError), match="text"):
            NamedPolicy(path).load()
    with pytest.raises(PolicySpecError, match="cannot be loaded"):
        NamedPolicy(text, allow_pickle=True).load()
