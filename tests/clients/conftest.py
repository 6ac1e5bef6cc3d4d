"""Runs that can be repeated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture
def seeded() -> Iterator[None]:
    """Let torch and NumPy draw the same numbers each time, in one thread, whatever ran before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    yield
    torch.set_num_threads(threads)
