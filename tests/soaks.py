"""Duration of the soak tests in seconds: the environment variable ``SOAK_SECONDS``, by default 20."""

from __future__ import annotations

import os

SECONDS = float(os.environ.get("SOAK_SECONDS", "20"))


def rounds(per_second: float) -> int:
    """Return a number of rounds proportional to the duration of a soak test."""
    return max(1, round(per_second * SECONDS))
