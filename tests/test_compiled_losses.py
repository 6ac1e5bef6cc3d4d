"""The script that measures compiled losses reports every task."""

from __future__ import annotations

from functools import partial

import pytest

from tests.optional import torch

compiled_losses = pytest.importorskip("benchmarks.scripts.compiled_losses")


@pytest.mark.long
def test_every_task_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Traces the losses and their gradients, but generates no code.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(compiled_losses, "ROUNDS", 1)
    monkeypatch.setattr(compiled_losses, "ROUND_S", 0.0)
    for name, (make, _) in compiled_losses.TASKS.items():
        monkeypatch.setitem(compiled_losses.TASKS, name, (make, (8,)))
    assert compiled_losses.main([]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["task", "width", "plain", "ms"]
    assert [row.split()[0] for row in rows] == ["ppo", "dqn", "sac"]
    assert all(float(number) > 0 for row in rows for number in row.split()[2:4])


def test_unknown_tasks_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compiled_losses.main(["--tasks", "td3"])
    assert "invalid choice: 'td3'" in capsys.readouterr().err
