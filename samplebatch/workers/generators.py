"""The generators of a process, of `random`, `numpy.random` and torch: their states, for workers and for trainers."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np


def generators_state() -> dict[str, Any]:
    """Return the states of the process's own generators; None for that of torch where nobody has imported it."""
    torch = sys.modules.get("torch")
    drawn = None if torch is None else torch.get_rng_state()
    return {"random": random.getstate(), "numpy": np.random.get_state(legacy=False), "torch": drawn}


def load_generators(state: Mapping[str, Any] | None) -> None:
    """Let the process's own generators go on; a worker without a process leaves those of its caller alone.

    Examples
    --------
    >>> state = generators_state()
    >>> drawn = random.random(), np.random.random()
    >>> load_generators(state)
    >>> drawn == (random.random(), np.random.random())
    True
    """
    if state is None:
        return
    random.setstate(state["random"])
    np.random.set_state(state["numpy"])
    if state["torch"] is not None:
        import_module("torch").set_rng_state(state["torch"])
