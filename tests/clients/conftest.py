"""Tianshou without its compiler, and runs that can be repeated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.uncompiled import uncompile_tianshou


@pytest.fixture(autouse=True)
def _uncompiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "tianshou" in request.module.__name__:
        uncompile_tianshou(monkeypatch)


@pytest.fixture
def seeded() -> Iterator[None]:
    """Let torch and NumPy draw the same numbers each time, in one thread, whatever ran before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    yield
    torch.set_num_threads(threads)
