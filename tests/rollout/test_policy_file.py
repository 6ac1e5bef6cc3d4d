"""Policies out of files, and what is said of files that hold none."""

from __future__ import annotations

from pathlib import Path

import pytest

from samplebatch.errors import PolicySpecError, UntrustedPickleError
from samplebatch.rollout.policy_file import load_policy


def test_an_exported_program_needs_no_trust(tmp_path: Path) -> None:
    import torch

    linear, path = torch.nn.Linear(4, 2), tmp_path / "policy.pt2"
    rows = torch.export.Dim.AUTO
    torch.export.save(torch.export.export(linear, (torch.zeros(3, 4),), dynamic_shapes=({0: rows},)), path)
    obs = torch.ones(5, 4)
    assert torch.equal(load_policy(path)(obs), linear(obs))


def test_a_pickled_module_is_loaded_only_if_that_is_allowed(tmp_path: Path) -> None:
    import torch

    linear, path = torch.nn.Linear(4, 2), tmp_path / "policy.pt"
    torch.save(linear, path)
    with pytest.raises(UntrustedPickleError, match="pickled module"):
        load_policy(path)
    assert torch.equal(load_policy(path, allow_pickle=True).weight, linear.weight)


def test_files_that_hold_no_policy_are_refused(tmp_path: Path) -> None:
    import torch

    weights, text, program = (tmp_path / name for name in ("weights.pt", "text.pt", "text.pt2"))
    torch.save(torch.nn.Linear(4, 2).state_dict(), weights)
    text.write_text("hello")
    program.write_text("hello")
    with pytest.raises(PolicySpecError, match="holds a OrderedDict; where it holds weights, name a 'module:function'"):
        load_policy(weights)
    for path in (text, program):
        with pytest.raises((PolicySpecError, UntrustedPickleError), match="text"):
            load_policy(path)
    with pytest.raises(PolicySpecError, match="cannot be loaded"):
        load_policy(text, allow_pickle=True)
