"""Runs that can be repeated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture
def seeded() -> Iterator[None]:
    """Seed torch and NumPy before each test, and use one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    yield
    torch.set_num_threads(threads)
