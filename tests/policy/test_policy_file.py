"""Policies from files, and errors for files without a policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from samplebatch.errors import PolicySpecError, UntrustedPickleError
from samplebatch.policy.source import load_policy


def test_an_exported_program_is_loaded_only_if_that_is_allowed(tmp_path: Path) -> None:
    import torch

    linear, path = torch.nn.Linear(4, 2), tmp_path / "policy.pt2"
    rows = torch.export.Dim.AUTO
    torch.export.save(torch.export.export(linear, (torch.zeros(3, 4),), dynamic_shapes=({0: rows},)), path)
    obs = torch.ones(5, 4)
    with pytest.raises(UntrustedPickleError, match="exported program"):
        load_policy(path)
    assert torch.equal(load_policy(path, allow_pickle=True)(obs), linear(obs))


def test_torch_releases_with_unsafe_weights_only_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    torch.save({}, tmp_path / "policy.pt")
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.5.1"))
    with pytest.raises(UntrustedPickleError, match=r"when torch 2\.5\.1 loads it"):
        load_policy(tmp_path / "policy.pt")


def test_a_pickled_module_is_loaded_only_if_that_is_allowed(tmp_path: Path) -> None:
    import torch

    linear, path = torch.nn.Linear(4, 2), tmp_path / "policy.pt"
    torch.save(linear, path)
    with pytest.raises(UntrustedPickleError, match="pickled module"):
        load_policy(path)
    assert torch.equal(load_policy(path, allow_pickle=True).weight, linear.weight)


def test_files_without_a_policy_are_rejected(tmp_path: Path) -> None:
    import torch

    weights, text, program = (tmp_path / name for name in ("weights.pt", "text.pt", "text.pt2"))
    torch.save(torch.nn.Linear(4, 2).state_dict(), weights)
    text.write_text("hello")
    program.write_text("hello")
    with pytest.raises(
        PolicySpecError, match="got a OrderedDict; for a file of weights, pass the name 'module:function'"
    ):
        load_policy(weights)
    for path in (text, program):
        with pytest.raises((PolicySpecError, UntrustedPickleError), match="text"):
            load_policy(path)
        with pytest.raises(PolicySpecError, match=r"must be a file that torch\.(export\.)?save wrote"):
            load_policy(path, allow_pickle=True)
