"""How long the soaks last, in seconds: the environment variable ``SOAK_SECONDS``, 20 if it is not set."""

from __future__ import annotations

import os

SECONDS = float(os.environ.get("SOAK_SECONDS", "20"))


def rounds(per_second: float) -> int:
    """Return a number of rounds that grows with the seconds of a soak."""
    return max(1, round(per_second * SECONDS))
