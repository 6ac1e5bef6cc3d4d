"""Killing of workers that may end by themselves meanwhile."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from contextlib import suppress


def kill_one(pids: Sequence[int]) -> set[int]:
    """Kill one of some processes at random; return its id, or nothing if it has just ended."""
    pid = random.choice(pids)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return {pid}
    return set()
